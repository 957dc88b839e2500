"""Tensors without data: a rank of a large model computes its shapes on a CPU, in kilobytes.

Inside `NoData` every tensor of floating-point numbers that is made from nothing (weights, gradient
buffers, received activations) is one of torch's fake tensors: shape, strides, dtype, no values. All
that is computed from one has none either. Integers (tokens, positions, indices) and single numbers
are real. So the code of a training step runs as it is, except where it asks for a value that is not
there:

- a number read off such a tensor is 1, a truth value True ("every result is finite");
- every element counts as non-zero;
- a real tensor that is to be changed by it stays as it is.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapo_megatron.compat.torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    finished_work,
    is_in_place,
    operator_name,
    process_group,
    reads_one_number,
    returns_work_alone,
    storage_id,
    tree_leaves,
)

_ATEN, _C10D = torch.ops.aten, torch.ops.c10d
_BUFFER_ARGUMENT = {
    "allgather_": 0,
    "_allgather_base_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "alltoall_": 1,
    "alltoall_base_": 1,
}
"""Argument of a collective that is the whole, not one rank's part (0 where both are)."""
_NAMES = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}


@dataclass(slots=True)
class Traffic:
    """Calls of one kind of collective over one process group, and the bytes they were about."""

    num_calls: int = 0
    num_bytes: int = 0
    """Bytes of the whole tensor: an all-gather's output, a reduce-scatter's input, an all-to-all's
    input on this rank."""


class NoData(TorchDispatchMode):
    """Computes with tensors that have no data; counts bytes and collectives on the way.

    Attributes:
        traffic: traffic by (collective, description of the process group).
        live_bytes: bytes of all tensors without data that exist now.
        peak_bytes: the most that existed at once since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self.live_bytes = self.peak_bytes = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
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
        name = operator_name(func)
        buffers = _tensors(args[_BUFFER_ARGUMENT.get(name, 0)])
        group = next(unboxed for unboxed in map(process_group, args) if unboxed is not None)
        traffic = self.traffic[_NAMES[name], group.group_desc]
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
    # Megatron-core makes an empty tensor of one element to give it another's memory.
    return result.numel() > 1 or func.overloadpacket is _ATEN.empty


def _tensors(argument: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)]
