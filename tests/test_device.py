"""Copies between host and device, and flags that are read together."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from gapo_megatron.device import Flags, to_device, to_host
from gapo_megatron.errors import DivergenceError
from tests.messages import mentions
from tests.synchronisations import counted_waits

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.zeros((0,), dtype=np.float32),
    np.array([[True, False, True]]),
    np.arange(6, dtype=np.int32)[::2],
    np.array(1.5),
    np.array([0.1, 0.2], dtype=np.float32),
]


@pytest.mark.parametrize("raised", [(), (False,) * 20, (False, True, True)])
def test_the_first_flag_that_is_raised_explains_and_one_wait_reads_all(
    raised: tuple[bool, ...],
) -> None:
    flags = Flags()
    with counted_waits() as waits:
        for number, is_raised in enumerate(raised):
            flags.where = f"micro-batch {number}"
            flags.keep(torch.tensor(is_raised), lambda n=number: DivergenceError(f"row {n + 7}"))
        found = flags.any(CPU)
        assert not waits
        error = flags.error()
    assert sum(waits.values()) == (len(raised) > 0)
    assert bool(found) == any(raised) == (error is not None)
    if error is None:
        return flags.check()
    with pytest.raises(DivergenceError, match=mentions("micro-batch 1", "row 8")):
        flags.check()


@pytest.mark.parametrize("arrays", [ARRAYS, ARRAYS[1:2], []])
def test_both_ways_keep_shapes_dtypes_and_bits(arrays: list[np.ndarray]) -> None:
    there = to_device(arrays, "cpu")
    back = to_host([tensor.requires_grad_(tensor.is_floating_point()) for tensor in there])
    for array, *tensors in zip(arrays, there, back, strict=True):
        for tensor in tensors:
            assert tensor.detach().numpy().dtype == array.dtype and tensor.shape == array.shape
            assert np.array_equal(tensor.detach().numpy(), array)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in there if tensor.numel())
    assert not any(tensor.requires_grad for tensor in back)
    assert not {t.data_ptr() for t in there if t.numel()} & {t.data_ptr() for t in back}


def test_a_gpu_gets_pinned_memory_in_one_copy_and_nobody_waits() -> None:
    calls: list[Any] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pin")
        return tensor

    def to(tensor: torch.Tensor, device: Any, *, non_blocking: bool) -> torch.Tensor:
        calls.append((torch.device(device).type, non_blocking))
        return tensor

    with patch.object(torch.Tensor, "pin_memory", pin), patch.object(torch.Tensor, "to", to):
        to_device(ARRAYS, "cuda")
    assert calls == ["pin", ("cuda", True)]
