"""Many small arrays between host and device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes; kernels may read several elements at a time."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Copy arrays to `device` without waiting: from pinned memory, in one piece.

    A copy from memory that the system may move makes the host wait for all that the device has been
    given to do.

    Args:
        arrays: arrays of any shape, with dtypes that torch has.
        device: where they go.

    Returns:
        Tensors of the arrays' shapes and dtypes: views of one buffer, which lives as long as they.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = np.zeros(max(size, _ALIGNMENT), dtype=np.uint8)  # torch gives an empty one no stride
    for start, array in zip(starts, arrays, strict=True):
        buffer[start : start + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
    host = torch.from_numpy(buffer)
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of one device to the host. Waits for the device, once.

    Args:
        tensors: tensors of any shape and dtype.

    Returns:
        Likewise, detached, on the CPU.
    """
    if not tensors:
        return []
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    parts = torch.cat(flat).cpu().split([len(part) for part in flat])
    return [
        # A copy begins where its dtype may; within the buffer that is not sure.
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
