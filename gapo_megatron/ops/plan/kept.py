"""Counts what autograd keeps between forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from gapo_megatron.compat.torch import storage_id


class KeptForBackward:
    """While active, the bytes of all memory that autograd has saved and that still exists.

    Tensors that share memory count once; so do views, with all that they are a view of.

    Attributes:
        num_bytes: now.
        peak_bytes: the most so far.
    """

    def __init__(self, besides: Iterable[Tensor]) -> None:
        """`besides`: tensors whose memory is counted elsewhere (weights)."""
        self.num_bytes = self.peak_bytes = 0
        self._counted = {storage_id(tensor.untyped_storage()) for tensor in besides}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._save, _same)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, at)

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = storage_id(storage), storage.nbytes()
        if key not in self._counted:
            self._counted.add(key)
            self.num_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
            weakref.finalize(storage, self._free, key, size)
        # The same memory under another name: an output would otherwise keep its own graph alive.
        return tensor.detach()

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.num_bytes -= size


def _same(tensor: Tensor) -> Tensor:
    return tensor
