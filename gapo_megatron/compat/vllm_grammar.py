"""Undocumented parts of vLLM in use: checks of grammars before a request has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BACKEND = "xgrammar"
"""The backend of vLLM's structured outputs, for every request alike."""


def check_grammar(tag: str, schemas: Sequence[Mapping[str, Any]]) -> None:
    """Check that the backend can hold an output to a structural tag.

    The engine would find it at the request's first step, and fail. Within a structural tag it
    would ignore what of a JSON schema it does not know.

    Args:
        tag: a structural tag of xgrammar, as JSON.
        schemas: the JSON schemas in it.

    Raises:
        ValueError: it cannot; says why.
    """
    # Uses: v1.structured_output.backend_xgrammar.validate_xgrammar_grammar
    # Versions: vllm 0.32.0
    # Upstream: none found
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    outputs = [StructuredOutputsParams(json=dict(schema)) for schema in schemas]
    for one in (*outputs, StructuredOutputsParams(structural_tag=tag)):
        params = SamplingParams(structured_outputs=one)
        try:
            validate_xgrammar_grammar(params)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
