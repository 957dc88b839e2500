"""Copy many small arrays between host and device at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16
"""Alignment in bytes, since kernels may read several elements at a time."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Copy arrays to `device` in one asynchronous transfer from pinned memory.

    A copy from pageable memory would make the host wait for all queued work of the device.

    Args:
        arrays: arrays of any shape, with dtypes that torch has.
        device: target device.

    Returns:
        Tensors of the arrays' shapes and dtypes: views of one buffer, kept alive by any of them.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = np.zeros(max(size, _ALIGNMENT), dtype=np.uint8)  # an empty tensor would have no stride
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
        Detached copies on the CPU.
    """
    if not tensors:
        return []
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    parts = torch.cat(flat).cpu().split([len(part) for part in flat])
    return [
        # Cloned, because a part of the buffer may not be aligned for its dtype.
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
