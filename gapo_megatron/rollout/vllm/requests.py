"""Conversion of requests to vLLM's parameters, and of vLLM's outputs to completions."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from gapo_megatron.compat.vllm_drafts import draft_counts
from gapo_megatron.errors import RolloutError
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.rollout.alternatives import MOST_ALTERNATIVES
from gapo_megatron.rollout.engine import Completion, Request

# For every request: no detokenisation, and an output only at a request's end.
TOKENS_ONLY: dict[str, Any] = {
    "detokenize": False,
    "flat_logprobs": True,
    "output_kind": RequestOutputKind.FINAL_ONLY,
    "skip_clone": True,
}


def to_params(request: Request, stop_token_ids: list[int]) -> SamplingParams:
    """Sampling parameters of vLLM for a request."""
    return SamplingParams(
        seed=request.seed,
        max_tokens=request.max_tokens,
        logprobs=_num_returned(request.num_alternatives),
        temperature=request.temperature,
        top_p=request.top_p,
        stop_token_ids=stop_token_ids,
        ignore_eos=True,  # the tokenizer's, which vLLM knows if grammars need it
        routed_experts_prompt_start=request.num_routed,
        structured_outputs=_structure(request.grammar),
        **TOKENS_ONLY,
    )


def _num_returned(num_alternatives: int) -> int:
    """Alternatives to ask vLLM for: always as many, so that of equally likely ones the same come.

    In a step vLLM looks for as many as any of its requests wants.
    """
    return MOST_ALTERNATIVES if num_alternatives else 0


def _structure(grammar: str) -> StructuredOutputsParams | None:
    return StructuredOutputsParams(structural_tag=grammar) if grammar else None


def to_completion(
    output: RequestOutput,
    *,
    aborted: bool,
    routed: Geometry | None = None,
    num_routed: int = 0,
    num_alternatives: int = 0,
) -> Completion:
    """Completion from vLLM's output of a request.

    Args:
        output: vLLM's output, with all tokens.
        aborted: whether the request was aborted.
        routed: the model, if the engine returns routes.
        num_routed: that of the request.
        num_alternatives: that of the request.

    Raises:
        RolloutError: a request that was not `aborted` ended neither at EOS nor at the limit, or its
            log-probs or routes do not match its tokens.
    """
    (completion,) = output.outputs
    flat, tokens = completion.logprobs, list(completion.token_ids)
    reason = completion.finish_reason
    expected = ("abort",) if aborted else ("stop", "length")
    if reason not in expected or not (tokens or aborted):
        raise RolloutError(
            f"vLLM ended request {output.request_id} with {reason!r} after {len(tokens)} tokens"
        )
    width = 1 + _num_returned(num_alternatives)  # the sampled token, and the most likely ones
    if flat is None or flat.token_ids[::width] != tokens or len(flat) != len(tokens):
        raise RolloutError(
            f"vLLM's log-probs do not match the tokens of request {output.request_id}"
        )
    routes = None
    if routed is not None and tokens:  # before its first token an aborted request has none
        num_rows = len(output.prompt_token_ids or ()) + len(tokens) - 1 - num_routed
        routes = _checked_routes(output, routed, num_rows)
    ids = np.asarray(flat.token_ids, dtype=np.int32).reshape(-1, width)
    log_probs = np.asarray(flat.logprobs, dtype=np.float32).reshape(-1, width)
    alternatives: tuple[np.ndarray, np.ndarray] | tuple[None, None] = None, None
    if num_alternatives:
        alternatives = _most_likely(ids[:, 1:], log_probs[:, 1:], num_alternatives)
    num_drafted, num_accepted = draft_counts(completion)
    return Completion(
        name=output.request_id,
        token_ids=np.asarray(tokens, dtype=np.int32),
        log_probs=np.ascontiguousarray(log_probs[:, 0]),
        reason=cast(Literal["stop", "length", "abort"], reason),
        alternative_ids=alternatives[0],
        alternative_log_probs=alternatives[1],
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        routes=routes,
    )


def _most_likely(
    ids: np.ndarray, log_probs: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` of each row, the most likely first, equally likely ones by their ids."""
    order = np.lexsort((ids, -log_probs))[:, :count]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(log_probs, order, 1)


def _checked_routes(output: RequestOutput, model: Geometry, num_rows: int) -> np.ndarray:
    """[num_rows, layers, experts per token] uint8, the experts that vLLM chose."""
    routes = output.outputs[0].routed_experts
    shape = (num_rows, model.num_layers, model.experts_per_token)
    if routes is None or (routes.shape, routes.dtype) != (shape, np.uint8):
        found = "none" if routes is None else f"{routes.dtype} {list(routes.shape)}"
        raise RolloutError(
            f"vLLM's routes of request {output.request_id} must be uint8 {list(shape)}, but are "
            f"{found}"
        )
    if routes.max(initial=0) >= model.num_experts:
        raise RolloutError(
            f"vLLM's routes of request {output.request_id} name expert {routes.max()} of "
            f"{model.num_experts}"
        )
    return routes
