"""Arrays between host and device in one copy."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from gapo_megatron.device.transfer import to_device, to_host

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.zeros((0,), dtype=np.float32),
    np.array([[True, False, True]]),
    np.arange(6, dtype=np.int32)[::2],
    np.array(1.5),
    np.array([0.1, 0.2], dtype=np.float32),
]


@pytest.mark.parametrize("arrays", [ARRAYS, ARRAYS[1:2], []])
def test_both_ways_keep_shapes_dtypes_and_bits(arrays: list[np.ndarray]) -> None:
    there = to_device(arrays, "cpu")
    back = to_host(there)
    for array, *tensors in zip(arrays, there, back, strict=True):
        for tensor in tensors:
            assert tensor.numpy().dtype == array.dtype and tensor.shape == array.shape
            assert np.array_equal(tensor.numpy(), array)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in there if tensor.numel())


def test_what_comes_back_is_detached_and_a_copy() -> None:
    value = torch.ones(2, requires_grad=True)
    (back,) = to_host([value * 2])
    assert not back.requires_grad and back.tolist() == [2.0, 2.0]


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
