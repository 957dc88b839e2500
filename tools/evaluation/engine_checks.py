"""What `tools/evaluate.py` refuses of a model before its engine is built. Imports no torch."""

from __future__ import annotations

from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.checks import check_engine_heads, check_positions
from gapo_megatron.models.config_json import ModelFacts
from gapo_megatron.models.quantization import FP8, MXFP4, quantization_of

_PRECISIONS = {FP8: ("bf16", "fp16"), MXFP4: ("bf16",)}
"""Precisions in which vLLM 0.32 computes, by quant_method (its `get_supported_act_dtypes`)."""


def check_engine(facts: ModelFacts, config: Config) -> None:
    """Refuse what vLLM cannot do with the weights of a folder.

    Args:
        facts: the folder's config.json.
        config: the engine's config.

    Raises:
        ConfigError: the folder's weights are quantized, and vLLM does not compute with such weights
            in this precision; or see `check_engine_heads` and `check_positions`.
    """
    method, precision = quantization_of(facts), config.model.precision
    allowed = _PRECISIONS.get(method or "", (precision,))
    if precision not in allowed:
        raise ConfigError(
            f"model.precision ({precision!r}) must be {' or '.join(map(repr, allowed))} for the "
            f"{method} weights of model.hf_dir ({config.model.hf_dir}): vLLM computes with those "
            "in no other precision"
        )
    check_engine_heads(facts, config.rollout.tensor_parallel_size)
    check_positions(facts, config.max_sequence_tokens)
