"""The optimizer's state in host memory, while the rollout engine needs the device's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class Offload:
    """Moves moments and master weights between a device and host memory, bit for bit.

    Only their `data` moves: who holds the tensors (Megatron-core, a checkpoint being written)
    sees the same ones, here or there. Megatron-core's own `offload_to_cpu` is not used: it also
    moves shards that are views of float32 weights, which come back as copies, and the model would
    no longer see an update.

    The host's copies are made once, page-locked where there is a GPU, and kept: the optimizer's
    bytes on this rank, each tensor's rounded up to a power of two by torch's allocator.

    Args:
        optimizers: the parts of one rank.
        weights: the model's. State that shares their memory stays with them.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], weights: Iterable[Tensor]):
        self._optimizers = list(optimizers)
        self._weights = list(weights)
        self._host: dict[Tensor, Tensor] = {}
        self._device: dict[Tensor, torch.device] = {}

    def to_host(self) -> None:
        """Leave the device to others. Nothing happens when it is left already."""
        if self._device:
            return
        for tensor in self._state():
            if tensor not in self._host:
                self._host[tensor] = torch.empty_like(
                    tensor, device="cpu", pin_memory=tensor.is_cuda
                )
            self._host[tensor].copy_(tensor, non_blocking=True)
            self._device[tensor] = tensor.device
        _wait()  # what is freed next must have been read, and what is read next written
        for tensor in self._device:
            tensor.data = self._host[tensor]

    def to_device(self) -> None:
        """Back to where it was. Nothing happens when it is there."""
        for tensor, device in self._device.items():
            # A copy on a CPU too: the host's keeps its place for the next time.
            tensor.data = self._host[tensor].to(device, non_blocking=True, copy=True)
        self._device.clear()

    def _state(self) -> Iterator[Tensor]:
        """What takes memory: no step counters, and nothing twice."""
        shared = {weight.untyped_storage().data_ptr() for weight in self._weights}
        for optimizer in self._optimizers:
            for tensor in _tensors(optimizer):
                if tensor.dim() > 0 and tensor.untyped_storage().data_ptr() not in shared:
                    yield tensor


def _tensors(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            state = optimizer.state.get(parameter, {})
            yield from (one for one in state.values() if isinstance(one, Tensor))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
