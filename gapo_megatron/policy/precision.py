"""Precision of parameters and activations, as settings of Megatron-core."""

from __future__ import annotations

from typing import Any

import torch

from gapo_megatron.compat.transformer_engine import is_installed, why_not
from gapo_megatron.config import ModelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.logprob import Resolved, choose_together
from gapo_megatron.models.fp8 import RECIPES


def precision_settings(precision: str, *, fp8_recipe: str) -> dict[str, Any]:
    """TransformerConfig fields of `model.precision` and `model.fp8_recipe`.

    bf16, fp16 and fp8 have 16-bit parameters (fp8: bf16), fp32 master weights in the optimizer,
    and fp32 gradients. fp8 runs the layers' matrix products in Transformer Engine, which quantises
    both factors each time. The output layer always accumulates logits in fp32.

    `fp64` is not a user's setting; `policy.exact` compares fp32 with it. Whether this machine
    supports fp8 is checked by `check_fp8`.
    """
    if precision == "fp64":
        return {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
    if precision == "fp32":
        return {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    if precision == "fp16":
        return {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    if precision == "bf16":
        return settings
    return settings | {"fp8_recipe": fp8_recipe} | RECIPES[fp8_recipe].settings


def check_fp8(fp8_recipe: str) -> None:
    """Check that Transformer Engine supports fp8 with this recipe on this machine.

    Raises:
        ConfigError: no GPU, no Transformer Engine, or the GPU or CUDA does not support it.
    """
    if not torch.cuda.is_available() or not is_installed():
        raise ConfigError(
            "model.precision ('fp8') needs a GPU and Transformer Engine; use 'bf16', 'fp16' or "
            "'fp32' here"
        )
    if reason := why_not(RECIPES[fp8_recipe].question):
        raise ConfigError(
            f"model.precision ('fp8') with model.fp8_recipe ('{fp8_recipe}') does not run on "
            f"{torch.cuda.get_device_name()}: {reason}"
        )


def choose_head(config: ModelConfig, device: torch.device) -> Resolved:
    """Resolve `model.head` "auto" to an implementation, the same on every rank.

    Collectives: those of `choose_together`.

    Raises:
        ConfigError: the implementation in `model.head` does not support this device.
    """
    try:
        return choose_together(device, getattr(torch, config.dtype), config.head)
    except ValueError as error:
        raise ConfigError(f"model.head ('{config.head}'): {error}") from None
