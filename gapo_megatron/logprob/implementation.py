"""Which code computes the softmax statistics and the gradients of the logits."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, Literal

import torch

Name = Literal["auto", "torch", "triton"]

logger = logging.getLogger(__name__)


def choose_implementation(device: torch.device, dtype: torch.dtype, name: Name = "auto") -> Any:
    """The module whose `softmax_stats` and `grad_logits` serve hidden states of this kind.

    `auto` is Triton for bfloat16 on NVIDIA Hopper, which its tiles are chosen for, and torch
    elsewhere. The choice is logged once.

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
    if name == "auto":
        name = "triton" if suits_triton else "torch"
    elif name == "triton" and not suits_triton:
        raise ValueError(
            "implementation ('triton') needs bfloat16 on a GPU of compute capability 9, not "
            f"{dtype} on {device} {capability or ''}"
        )
    logger.info("log-probs of %s on %s: %s", dtype, device, name)
    module = {"torch": "tiles", "triton": "triton_kernels"}[name]
    return importlib.import_module(f"gapo_megatron.logprob.{module}")
