"""Counts what would make the host wait for a GPU, on a machine that has none.

On a CPU every tensor is the host's already: nothing waits, and devices do not tell what would. So
what counts is the call. A tensor that is read (its value or its number of elements enters Python),
a copy between devices that is not asynchronous, an operator whose output's size depends on values.

It does not see `x[[0, 1]]`, `copy_` from host memory, `torch.allclose` and `new_tensor`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gapo_megatron.compat import cpu

Waits = Counter[str]
"""What waited, "call at package/file:function" -> how often."""


def ours(waits: Waits) -> Waits:
    """Those of this package; the others are Megatron-core's."""
    return Counter({call: number for call, number in waits.items() if " at gapo_" in call})


_READS = ("tolist", "cpu")
# The first is attention without a fused kernel (docs/numerics.md); the second compares states of
# the CPU's random generator.
_NOT_THE_DEVICE = ("gapo_megatron/sequences.py:pack_sequences", "megatron/random.py:fork")
# By their names in ATen: a number for the host, or an output of unknown size.
_OPERATORS = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}


@contextlib.contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count in the block, also in backward passes and in Megatron-core under the emulation."""
    waits: Waits = Counter()

    def synchronize(*_: Any, **__: Any) -> None:
        _count(waits, "synchronize")

    with contextlib.ExitStack() as patches:
        for name in _READS:
            method = _counting(waits, getattr(torch.Tensor, name), lambda *_, **__: True)
            patches.enter_context(patch.object(torch.Tensor, name, method))
        to = _counting(waits, torch.Tensor.to, _waits_for_copy)
        patches.enter_context(patch.object(torch.Tensor, "to", to))
        for owner, name in itertools.product((torch, cpu._TORCH), ("tensor", "as_tensor")):
            factory = _counting(waits, getattr(owner, name), _makes_on_device)
            patches.enter_context(patch.object(owner, name, factory))
        for owner in (cpu._CudaStandIn, cpu._Idle):
            fake = staticmethod(synchronize)
            patches.enter_context(patch.object(owner, "synchronize", fake, create=True))
        patches.enter_context(_Operators(waits))
        yield waits


def _counting(
    waits: Waits, function: Callable[..., Any], does_wait: Callable[..., bool]
) -> Callable[..., Any]:
    """`function`, which does nothing on a CPU and so may never become an operator."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if does_wait(*args, **kwargs):
            _count(waits, function.__name__)
        return function(*args, **kwargs)

    return counted


def _waits_for_copy(_: Tensor, *args: Any, **kwargs: Any) -> bool:
    given = [*args[:1], kwargs.get("device")]
    names_device = any(isinstance(one, (str, torch.device)) for one in given)
    return names_device and not kwargs.get("non_blocking")


def _makes_on_device(*_: Any, device: Any = None, **__: Any) -> bool:
    return device is not None


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in ("index", "index_put", "index_put_"):
            waits = any(one is not None and one.dtype == torch.bool for one in args[1])
            # A single number from the host is filled in where the mask says so: no list of places.
            waits = waits and not (name != "index" and args[2].dim() == 0)
        elif name == "repeat_interleave":
            waits = kwargs.get("output_size") is None
        elif name == "segment_reduce":
            waits = not kwargs.get("unsafe")
        else:
            waits = name in _OPERATORS
        if waits:
            _count(self.waits, name)
        return func(*args, **kwargs)


def _count(waits: Waits, call: str) -> None:
    """Put it down to the innermost function of the package or of Megatron-core that called."""
    place = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for package in {"gapo_megatron", "megatron"} & set(path.parts):
            where = f"{package}/{path.name}:{frame.f_code.co_name}"
            if where.startswith(_NOT_THE_DEVICE):
                return
            place = place or where
        frame = frame.f_back
    if place:
        waits[f"{call} at {place}"] += 1
