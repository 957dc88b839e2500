"""Undocumented parts of Transformer Engine in use, and whether it is installed.

Imports it only when needed. Written for 2.20.2 without a GPU: NOT YET RUN on one.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from typing import Any

from torch import Tensor, nn

from gapo_megatron.compat.library_errors import naming_transformer_engine

DEBUG_ENVIRONMENT = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "1"}
"""Set before its import, makes it log which attention it runs."""
# Uses: NVTE_DEBUG, NVTE_DEBUG_LEVEL (documented)
# Versions: transformer-engine 2.20.2
# Upstream: NVIDIA/TransformerEngine#3142 (merged, documentation)


def is_installed() -> bool:
    """Whether Transformer Engine is installed; if so, imports it. Call it only with a GPU.

    Raises:
        ConfigError: it is installed and cannot be imported.
    """
    # Uses: the name of the package
    # Versions: transformer-engine 2.20.2
    # Upstream: none found
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    # Megatron-core treats some import errors as its absence, and would lack the requested layers.
    with naming_transformer_engine():
        importlib.import_module("transformer_engine.pytorch")
    return True


def why_not(question: str) -> str:
    """The reason why this GPU does not support a kind of fp8; empty if it does.

    Args:
        question: name of Transformer Engine's function that checks it.
    """
    # Uses: is_fp8_available, is_mxfp8_available, is_fp8_block_scaling_available (public)
    # Versions: transformer-engine 2.20.2
    # Upstream: none needed
    can_run, reason = getattr(importlib.import_module("transformer_engine.pytorch"), question)(
        return_reason=True
    )
    return "" if can_run else reason or "Transformer Engine gives no reason"


def free_fp8_copies(model: nn.Module) -> None:
    """Free Transformer Engine's fp8 copies of weights.

    It creates them in the first micro-batch of every pass.
    """
    # Uses: TransformerEngineBaseModule._fp8_workspaces
    # Versions: transformer-engine 2.20.2
    # Upstream: none found (NVIDIA/TransformerEngine#820, merged, made them;
    #     verl-project/verl#6952, merged, frees them likewise)
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def fuse_weight_gradients(model: nn.Module, *, fuse: bool = True) -> None:
    """Let Transformer Engine's linears accumulate into `main_grad` (float32) in the GEMM itself.

    Not those of frozen weights, which have no `main_grad`: `fuse=False` undoes it.

    Otherwise every micro-batch writes a bf16 gradient of every weight and then adds it: 12 bytes of
    traffic per parameter, and a rounding. The field of TransformerConfig would also require apex's
    extension, which Megatron-core's own layers use
    (`optimizer_implementation.fuse_weight_gradients_by_apex`).
    """
    # Uses: fuse_wgrad_accumulation, set on modules that have it
    # Versions: transformer-engine 2.20.2
    # Upstream: none found (the constructor's argument is public; close to it
    #     NVIDIA/Megatron-LM#7101, open)
    linears: list[Any] = [
        module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")
    ]
    # A version with another name for it would silently be slower.
    assert linears, "no linear of Transformer Engine's has fuse_wgrad_accumulation"
    for linear in linears:
        linear.fuse_wgrad_accumulation = fuse


def return_normed_input(linear: nn.Module) -> None:
    """Let a linear layer that begins with a norm also return what its product gets."""
    # Uses: LayerNormLinear.return_layernorm_output (a public argument of its constructor)
    # Versions: transformer-engine 2.20.2
    # Upstream: none found
    if hasattr(linear, "return_layernorm_output"):
        linear.return_layernorm_output = True  # type: ignore[assignment]


def split_output(inputs: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input of a linear layer's product, output and bias to add, as `return_normed_input` left it.

    Megatron-core's layers return (output, bias). Its wrapper of Transformer Engine's layer with a
    norm then returns ((output, normed input), None), or (output, bias, normed input) for a bias
    that the next layer adds.
    """
    # Uses: what LayerNormLinear.forward returns, and Megatron-core's wrapper of it
    # Versions: transformer-engine 2.20.2, megatron-core 0.19.2
    # Upstream: none found
    if len(output) == 3:
        y, bias, x = output
    elif isinstance(output[0], tuple):
        (y, x), bias = output
    else:
        (y, bias), x = output, inputs[0]
    return x, y, bias


def forbid_unfused_attention() -> None:
    """Make unfused attention an error, unless the environment already sets it."""
    # Uses: NVTE_UNFUSED_ATTN (documented, "subject to change")
    # Versions: transformer-engine 2.20.2
    # Upstream: NVIDIA/TransformerEngine#3142 (merged, documentation)
    os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")


def attention_in_use() -> list[str]:
    """A list to which running attention kernels are added; needs `DEBUG_ENVIRONMENT`."""
    # Uses: log lines "Running with ..." of dot_product_attention.py
    # Versions: transformer-engine 2.20.2
    # Upstream: none found that can be asked (NVIDIA/TransformerEngine#2964, merged, refactoring)
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message.startswith("Running with "):
                said.append(message.removeprefix("Running with "))

    logging.getLogger().addHandler(Ear())
    return said
