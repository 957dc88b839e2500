"""Number formats: parameters, activations, and what Megatron-core calls them."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from gapo_megatron.config import ModelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.logprob import choose_implementation


def precision_settings(precision: str) -> dict[str, Any]:
    """TransformerConfig fields of `model.precision`.

    bf16 and fp8 hold bf16 parameters beside fp32 master weights in the optimizer, and sum
    gradients in fp32; fp8 runs the layers' matrix products in Transformer Engine's hybrid format
    (E4M3 forward, E5M2 gradients). The head is apart: it accumulates logits in fp32 always.

    Raises:
        ConfigError: fp8 without Transformer Engine.
    """
    if precision == "fp32":
        return {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    if precision == "bf16":
        return settings
    check_fp8()
    # Scales of the tensor at hand: delayed scaling carries a history from pass to pass, and the old
    # and the new pass would differ at equal weights.
    return settings | {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


def check_fp8() -> None:
    """Raise ConfigError unless fp8 can run here."""
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "model.precision ('fp8') needs a GPU and Transformer Engine; use 'bf16' or 'fp32' here"
        )


def check_head(config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError if `model.head` names code that does not serve this device."""
    dtype = precision_settings(config.precision)["params_dtype"]
    try:
        choose_implementation(device, dtype, config.head)
    except ValueError as error:
        raise ConfigError(f"model.head ('{config.head}'): {error}") from None
