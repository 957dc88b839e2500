"""Memory for large tensors on the host."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_BYTES = 4 * 2**20


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor with undefined content.

    Large ones use huge pages: allocating fresh memory in pages of 4 KiB takes several times as long
    as filling it.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < _HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
