"""Chooses the implementation of softmax statistics and gradients of the logits."""

from __future__ import annotations

import functools
import importlib
import logging
import subprocess
from typing import Any, Literal

import torch
import torch.distributed as dist

from gapo_megatron.logprob.self_check import find_fault, find_reduction_fault

Name = Literal["auto", "torch", "triton"]
Resolved = Literal["torch", "triton"]

logger = logging.getLogger(__name__)

_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of the device, not of the kernels."""


def choose_implementation(device: torch.device, dtype: torch.dtype, name: Name = "auto") -> Any:
    """Return the module with `softmax_stats` and `grad_logits` for hidden states of this kind.

    `auto` is Triton for 16-bit dtypes on NVIDIA Hopper, for which its tiles are chosen, if its
    kernels agree with float64 on this device (`self_check`: milliseconds, or seconds if Triton has
    to compile them). Otherwise it is torch. The choice is made and logged once, with the reason.

    Raises:
        ValueError: `name` is "triton", and it does not support this device or dtype.
    """
    return _load(_choose(device.type, dtype, _capability(device), name))


def choose_together(device: torch.device, dtype: torch.dtype, name: Name) -> Resolved:
    """Choose one implementation for all ranks: with `auto`, Triton if every rank can run it.

    Ranks with different implementations would use different blocks of rows, and deadlock in their
    collectives.

    Collectives: with `auto` on a CUDA device, one all-reduce of a number over all ranks.

    Raises:
        ValueError: see `choose_implementation`.
    """
    capability = _capability(device)
    resolved = _choose(device.type, dtype, capability, name)
    if name != "auto" or capability is None:
        return resolved
    num_ranks = dist.get_world_size()
    without = torch.tensor(num_ranks if resolved == "triton" else dist.get_rank(), device=device)
    dist.all_reduce(without, op=dist.ReduceOp.MIN)
    first = int(without)
    if resolved == "triton" and first < num_ranks:
        logger.warning(
            "log-probs: torch on every rank, because rank %d cannot use Triton: see its log", first
        )
    return "triton" if first == num_ranks else "torch"


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None for another device."""
    if device.type == "cuda" and torch.version.cuda is not None:
        return torch.cuda.get_device_capability(device)
    return None


@functools.cache
def _choose(
    device: str, dtype: torch.dtype, capability: tuple[int, int] | None, name: Name
) -> Resolved:
    suits_triton = (capability or (0, 0))[0] == 9 and dtype.itemsize == 2
    resolved: Resolved
    if name != "auto":
        if name == "triton" and not suits_triton:
            raise ValueError(
                "implementation ('triton') needs bfloat16 or float16 on a GPU of compute "
                f"capability 9, not {dtype} on {device} {capability or ''}"
            )
        resolved, reason = name, "set by model.head"
    elif not suits_triton:
        resolved, reason = "torch", "Triton needs 16-bit dtypes and compute capability 9"
    else:
        fault = _why_not_triton(torch.device(device), dtype)
        resolved, reason = "torch" if fault else "triton", fault
        if fault:
            logger.warning("log-probs: Triton's kernels are not used: %s", fault)
        else:
            reason = "its kernels agree with float64 here"
    logger.info("log-probs of %s on %s: %s (%s)", dtype, device, resolved, reason)
    return resolved


def _load(name: Resolved) -> Any:
    module = {"torch": "tiles", "triton": "triton_kernels"}[name]
    return importlib.import_module(f"gapo_megatron.logprob.{module}")


def _why_not_triton(device: torch.device, dtype: torch.dtype) -> str:
    """Reason why Triton's kernels cannot be used here; "" if they can."""
    try:
        from gapo_megatron.compat.triton import TritonError

        code = _load("triton")
    except ImportError as error:
        return f"they do not load: {error}"
    try:
        return find_fault(code, device, dtype) or find_reduction_fault("triton", device)
    except _OF_THE_DEVICE:
        raise
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        # From Triton's compiler, the C compiler, their cache folder, or Triton's launcher.
        return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
