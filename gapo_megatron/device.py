"""Checks and copies that do not make the host wait for the device, and the precision of products.

Reading from a GPU whether a value is finite makes the host wait, during which it launches no
kernels. So checks within a pass over micro-batches store a flag on the device; after the pass all
flags are read at once, and the cause is determined only then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

_ALIGNMENT = 16
"""Alignment in bytes, since kernels may read several elements at a time."""


class Flags:
    """Flags of a pass, in the order in which they were stored.

    Attributes:
        where: prefix of the messages of later flags, e.g. the micro-batch.
    """

    def __init__(self) -> None:
        """Start without flags."""
        self.where = ""
        self._raised: list[torch.Tensor] = []
        self._explain: list[Callable[[], Exception]] = []
        self._where: list[str] = []

    def keep(self, is_raised: torch.Tensor, explain: Callable[[], Exception]) -> None:
        """Store a flag; does not wait for the device.

        Args:
            is_raised: scalar bool on the device, written as `~(...).all()`: for tensors without
                data (a deep dry run) every computed bool is True, so no flag is raised.
            explain: called if the flag is raised; may wait for the device. Tensors it refers to
                stay in memory until the flags are dropped, so it should hold rows, not hidden
                states.
        """
        self._raised.append(is_raised)
        self._explain.append(explain)
        self._where.append(self.where)

    def any(self, device: torch.device) -> torch.Tensor:
        """Whether any flag is raised: scalar bool on `device`; does not wait for the device."""
        if not self._raised:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack(self._raised).any()

    def error(self) -> Exception | None:
        """The error of the first raised flag, or None. Waits for the device, once."""
        if not self._raised:
            return None
        flags = torch.stack(self._raised).tolist()
        if True not in flags:
            return None
        first = flags.index(True)
        error = self._explain[first]()
        return type(error)(f"{self._where[first]}: {error}") if self._where[first] else error

    def check(self) -> None:
        """Raise the error of the first raised flag, if any. Waits for the device, once."""
        error = self.error()
        if error is not None:
            raise error


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
    dtypes = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    return [
        there[start : start + array.nbytes].view(dtype).view(array.shape)
        for start, array, dtype in zip(starts, arrays, dtypes, strict=True)
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
