"""How exactly products of float32 are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch


@contextlib.contextmanager
def float32_products(
    device: torch.device, precision: Literal["ieee", "bf16"] = "ieee"
) -> Iterator[None]:
    """Within, products of float32 have this precision, whatever the process allows.

    vLLM may have set TF32, for instance. `bf16` is a CPU's own: factors are rounded to bfloat16,
    sums stay float32.
    """
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = precision
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before
