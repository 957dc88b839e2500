"""One rank of a large model on a CPU: tensors without data, and fake process groups.

Inside `NoData` every new floating-point tensor (weights, gradient buffers, received activations) is
one of torch's fake tensors, with shape, strides and dtype but no values; results computed from fake
tensors are fake. Integers (tokens, positions, indices) and scalars are real. The code of a training
step runs unchanged, except where it reads a value that does not exist:

- a number read from a fake tensor is 1, a truth value is True ("every result is finite");
- every element counts as non-zero;
- a real tensor that a fake one would modify keeps its values.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.compat import cpu
from gapo_megatron.compat.torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fake_store,
    finished_work,
    is_in_place,
    operator_name,
    process_group,
    reads_one_number,
    returns_work_alone,
    storage_id,
    tree_leaves,
)
from gapo_megatron.config import ParallelConfig
from gapo_megatron.config.counts import check_world_size
from gapo_megatron.logprob import tiles
from gapo_megatron.policy import parallel
from gapo_megatron.policy.parallel import ParallelGroups

_ATEN, _C10D = torch.ops.aten, torch.ops.c10d
_COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "barrier": ("barrier", 0),
}
"""Name of a collective, and index of its argument that holds the whole tensor, not a rank's."""


@dataclass(slots=True)
class Traffic:
    """Calls of one collective over one process group, and their bytes."""

    num_calls: int = 0
    num_bytes: int = 0
    """Bytes of the whole tensors: an all-gather's output, a reduce-scatter's input, this rank's
    input of an all-to-all."""


class NoData(TorchDispatchMode):
    """Runs code on tensors without data, and counts their bytes and the collectives.

    Attributes:
        traffic: by (collective, description of the process group).
        live_bytes: bytes of all fake tensors that exist now.
        peak_bytes: largest `live_bytes` since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self.live_bytes = self.peak_bytes = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            with self._fake:
                result = func(*args, **kwargs)
            if not _is_made_without_data(func, result):
                return func(*args, **kwargs)
        elif any(isinstance(tensor, FakeTensor) for tensor in tensors):
            result = self._without_data(func, args, kwargs)
        else:
            return func(*args, **kwargs)
        self._account(result)
        return result

    def _without_data(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        first = args[0]
        if reads_one_number(func):
            return torch.ones((), dtype=first.dtype).item()
        if func is _ATEN.equal.default:
            return True
        if func is _ATEN.nonzero.default:
            return torch.ones(first.shape, dtype=torch.bool).nonzero()
        if func is _ATEN.masked_select.default:
            return first.new_empty(int(args[1].sum()))
        if is_in_place(func) and isinstance(first, Tensor) and not isinstance(first, FakeTensor):
            return first
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dim() == 0:
            return torch.ones((), dtype=result.dtype)
        return result

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        name, place = _COLLECTIVES[operator_name(func)]
        whole = tree_leaves(args[place])
        buffers = [leaf for leaf in whole if isinstance(leaf, Tensor)]
        group = next(unboxed for unboxed in map(process_group, args) if unboxed is not None)
        traffic = self.traffic[name, group.group_desc]
        traffic.num_calls += 1
        traffic.num_bytes += sum(tensor.nbytes for tensor in buffers)
        if not any(isinstance(tensor, FakeTensor) for tensor in tree_leaves(args)):
            return func(*args, **kwargs)
        work = finished_work()
        return work if returns_work_alone(func) else (args[0], work)

    def _account(self, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                key = storage_id(storage)
                if key not in self._storages:
                    self._storages[key] = storage.nbytes()
                    self.live_bytes += storage.nbytes()
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)


def _is_made_without_data(func: Any, result: Any) -> bool:
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return False
    # Megatron-core makes empty tensors of one element as placeholders for other memory.
    return result.numel() > 1 or func.overloadpacket is _ATEN.empty


@contextlib.contextmanager
def memory_of_a_gpu() -> Iterator[None]:
    """Let a CPU keep as much as a GPU: no logits, no float32 copies of what is multiplied."""
    with (
        mock.patch.object(tiles, "KEPT_BYTES", 0),
        mock.patch.object(cpu, "is_slow", lambda _: False),
    ):
        yield


class KeptForBackward(torch.autograd.graph.saved_tensors_hooks):
    """Counts the memory that autograd saves for the backward pass, while active.

    Memory counts once and as a whole, however many tensors and views share it.

    Attributes:
        num_bytes: bytes kept now.
        peak_bytes: largest `num_bytes` so far.
    """

    def __init__(self, besides: Iterable[Tensor]) -> None:
        """`besides`: tensors whose memory is not counted (weights)."""
        super().__init__(self._save, lambda tensor: tensor)
        self.num_bytes = self.peak_bytes = 0
        self._counted = {storage_id(tensor.untyped_storage()) for tensor in besides}

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = storage_id(storage), storage.nbytes()
        if key not in self._counted:
            self._counted.add(key)
            self.num_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
            weakref.finalize(storage, self._free, key, size)
        # Detached, because a saved output would otherwise keep its own graph alive.
        return tensor.detach()

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.num_bytes -= size


@contextlib.contextmanager
def fake_groups(config: ParallelConfig, *, rank: int, world_size: int) -> Iterator[ParallelGroups]:
    """Process groups of rank `rank` of `world_size` without any other process.

    They are torch's fake groups: a collective returns at once and moves nothing. No default process
    group may exist.

    Raises:
        ConfigError: the parallel sizes do not divide the world size.
    """
    check_world_size(config, world_size)
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        groups = parallel.initialize(config)
        try:
            yield groups
        finally:
            parallel.destroy()
    finally:
        dist.destroy_process_group()
