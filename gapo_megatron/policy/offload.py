"""Keep policy state in host memory while the rollout engine needs the device's."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapo_megatron.compat.megatron_checkpoint import sharded_tensors
from gapo_megatron.compat.torch import pin_memory, storage_id, unpin_memory

_ALIGNMENT = 512
"""Alignment in bytes of tensors that share one allocation."""


class Offload:
    """Moves moments and master weights between device and host memory, bit for bit.

    Only `data` moves, so Megatron-core, or a checkpoint being written, keeps the same tensor
    objects. Megatron-core's own `offload_to_cpu` cannot be used: it also moves shards that are
    views of float32 weights, which come back as copies, and the model would miss later updates.

    Host memory is allocated once and kept, pinned if there is a GPU: as many bytes as the
    optimizer has on this rank.

    Args:
        optimizers: Megatron-core's optimizers of this rank.
        weights: the model's weights. State that shares their memory is not moved.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], weights: Iterable[Tensor]):
        self._optimizers = list(optimizers)
        self._weights = list(weights)
        self._host: dict[Tensor, Tensor] = {}
        self._device: dict[Tensor, torch.device] = {}

    def to_host(self) -> None:
        """Move the state to host memory; does nothing if it is there."""
        if self._device:
            return
        state = list(self._state())
        missing = [tensor for tensor in state if tensor not in self._host]
        self._host |= zip(missing, _on_host(missing), strict=True)
        for tensor in state:
            self._host[tensor].copy_(tensor, non_blocking=True)
            self._device[tensor] = tensor.device
        _wait()  # the copies must be complete before the source is freed
        for tensor in state:
            tensor.data = self._host[tensor]

    def to_device(self) -> None:
        """Copy the state back to its device; does nothing if it is there."""
        for tensor, device in self._device.items():
            # A copy even on a CPU: the host memory is kept for the next time.
            tensor.data = self._host[tensor].to(device, non_blocking=True, copy=True)
        self._device.clear()

    def _state(self) -> Iterator[Tensor]:
        """Optimizer tensors to move: no step counters, and none that share the weights' memory."""
        shared = {_storage_id(weight) for weight in self._weights}
        for tensor in _tensors(self._optimizers):
            if tensor.dim() > 0 and _storage_id(tensor) not in shared:
                yield tensor


class WeightOffload:
    """Moves the memory of weights between device and host memory, bit for bit.

    Parameters, and Megatron-core's buffers, buckets and shards, are views of a few allocations and
    stay so. While the weights are in host memory these allocations are empty, and weights can only
    be read through `readable`.

    (A parameter's `data` must not move to another device: autograd would drop the node that
    accumulates its gradient, and with it the hook by which Megatron-core adds it to its buffer.)

    Args:
        weights: the model's weights.
        optimizers: Megatron-core's optimizers of this rank. While the weights are in host memory,
            optimizer state that is a view of them shows the host copy, so that a checkpoint can be
            written.
    """

    def __init__(
        self, weights: Iterable[Tensor], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        self._weights = list(weights)
        self._optimizers = list(optimizers)
        self._host: dict[int, Tensor] = {}
        self._device: dict[int, Tensor] = {}
        self._views: list[tuple[Tensor, Tensor]] = []

    @property
    def is_away(self) -> bool:
        """Whether the weights are only in host memory."""
        return bool(self._device)

    def to_host(self) -> None:
        """Move the state to host memory; does nothing if it is there."""
        if self.is_away:
            return
        device = {_storage_id(weight): _whole(weight) for weight in self._weights}
        if not self._host:
            self._host = dict(zip(device, _on_host([*device.values()]), strict=True))
        for key, whole in device.items():
            self._host[key].copy_(whole, non_blocking=True)
        _wait()
        for whole in device.values():
            whole.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # vLLM allocates outside torch's allocator
        self._device = device
        for tensor in _tensors(self._optimizers):
            if (host := self.readable(tensor)) is not tensor:
                self._views.append((tensor, tensor.data))
                tensor.data = host

    def to_device(self) -> None:
        """Copy the state back to its device; does nothing if it is there."""
        for key, whole in self._device.items():
            whole.untyped_storage().resize_(whole.nbytes)
            whole.copy_(self._host[key], non_blocking=True)
        for tensor, there in self._views:
            tensor.data = there
        self._device, self._views = {}, []

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor, or its host copy while the weights are in host memory."""
        key = _storage_id(tensor)
        if key not in self._device:
            return tensor
        host = self._host[key].view(tensor.dtype)
        return host.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def make_readable(self, state: dict[str, Any]) -> None:
        """Replace the weights in a sharded state dict by their readable copies."""
        for one in sharded_tensors(state):
            one.data = self.readable(one.data)


def _tensors(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            yield parameter
            state = optimizer.state.get(parameter, {})
            yield from (one for one in state.values() if isinstance(one, Tensor))


def _storage_id(tensor: Tensor) -> int:
    """Identity of a tensor's storage, also if it is empty and has no address."""
    return storage_id(tensor.untyped_storage())


def _whole(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised contiguous host tensors like these, in one allocation.

    For GPU tensors the memory is pinned by registering it, because torch's own allocator of pinned
    memory rounds every size up to a power of two. It is unregistered before it is freed.
    """
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    array = np.empty(sum(sizes), dtype=np.uint8)  # kept alive by all tensors in it
    memory = torch.from_numpy(array)
    if len(memory) and tensors[0].is_cuda:
        pin_memory(memory.data_ptr(), memory.nbytes)
        # Otherwise the next owner of these addresses could not pin them: CUDA error 712.
        weakref.finalize(array, unpin_memory, memory.data_ptr()).atexit = False
    parts = zip(memory.split(sizes), tensors, strict=True)
    return [part[: one.nbytes].view(one.dtype).view(one.shape) for part, one in parts]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
