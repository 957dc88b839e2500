"""Float32 matrix products by oneDNN, where torch's own library does not use the CPU's width.

torch gives float32 products to MKL, which on AMD's CPUs stays at AVX2: with AVX-512, oneDNN takes
half the time. Both accumulate in float32; oneDNN's rounding is about twice MKL's.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

_SMALLEST = 2**27
"""Multiplications from which oneDNN saves more than the 0.5 ms it needs for each new shape."""


def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Left [..., K] @ right [K, N] as [..., N] by oneDNN, or None where torch has to multiply.

    None for small products, other dtypes and other CPUs than AMD's with AVX-512, and for whatever
    autograd records. The factors may be transposed views.
    """
    # Uses: torch.ops.mkldnn._linear_pointwise
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#91763 (torch does the same on AArch64)
    if (
        not left.device.type == right.device.type == "cpu"
        or not left.dtype == right.dtype == torch.float32
        or right.ndim != 2
        or left.numel() * right.shape[1] < _SMALLEST
        or (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad))
        or not _is_faster()
    ):
        return None
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        left, right.t(), None, "none", [], ""
    )
    return product


@functools.cache
def _is_faster() -> bool:
    """Whether this is a CPU of AMD's with AVX-512, and torch was built with both libraries."""
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not has_both:
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")
