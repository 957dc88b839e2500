"""Which code computes the softmax statistics and the gradients of the logits."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, Literal

import torch

from gapo_megatron.logprob.self_check import find_fault

Name = Literal["auto", "torch", "triton"]

logger = logging.getLogger(__name__)


def choose_implementation(device: torch.device, dtype: torch.dtype, name: Name = "auto") -> Any:
    """The module whose `softmax_stats` and `grad_logits` serve hidden states of this kind.

    `auto` is Triton for bfloat16 on NVIDIA Hopper, which its tiles are chosen for, where its
    kernels agree with float64 on this device (`self_check`, milliseconds, and seconds where they
    are not in Triton's cache), and torch elsewhere. The choice is made and logged once, with the
    reason.

    Raises:
        ValueError: Triton was asked for where it does not serve.
    """
    capability = None
    if device.type == "cuda" and torch.version.cuda is not None:
        capability = torch.cuda.get_device_capability(device)
    return _choose(device.type, dtype, capability, name)


@functools.cache
def _choose(device: str, dtype: torch.dtype, capability: tuple[int, int] | None, name: Name) -> Any:
    suits_triton = (capability or (0, 0))[0] == 9 and dtype == torch.bfloat16
    reason = "model.head asks for it"
    if name == "auto" and not suits_triton:
        name, reason = "torch", "Triton serves bfloat16 on compute capability 9"
    elif name == "auto":
        fault = _why_not_triton(torch.device(device), dtype)
        name = "torch" if fault else "triton"
        reason = fault or "its kernels agree with float64 here"
        if fault:
            logger.warning("log-probs: Triton's kernels are not used: %s", fault)
    elif name == "triton" and not suits_triton:
        raise ValueError(
            "implementation ('triton') needs bfloat16 on a GPU of compute capability 9, not "
            f"{dtype} on {device} {capability or ''}"
        )
    logger.info("log-probs of %s on %s: %s (%s)", dtype, device, name, reason)
    return _load(name)


def _load(name: str) -> Any:
    module = {"torch": "tiles", "triton": "triton_kernels"}[name]
    return importlib.import_module(f"gapo_megatron.logprob.{module}")


def _why_not_triton(device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with Triton's kernels here; "" if nothing is."""
    try:
        from triton.errors import TritonError  # type: ignore[import-untyped]

        code = _load("triton")
    except ImportError as error:
        return f"they do not load: {error}"
    try:
        return find_fault(code, device, dtype)
    except (TritonError, RuntimeError) as error:  # of its compiler, or its launcher
        return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
