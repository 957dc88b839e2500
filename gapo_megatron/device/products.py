"""Precision of float32 matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch


@contextlib.contextmanager
def float32_products(
    device: torch.device, precision: Literal["ieee", "bf16"] = "ieee"
) -> Iterator[None]:
    """Set the precision of float32 products within the block.

    Outside the block the process's setting applies; vLLM, for example, may have set TF32. `bf16` is
    for CPUs: factors are rounded to bfloat16, sums are float32.
    """
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = precision
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before
