"""Which code serves which device: decided in one place, without a GPU at hand."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from gapo_megatron.logprob import tiles, triton_kernels
from gapo_megatron.logprob.implementation import _choose, choose_implementation
from tests.messages import mentions

HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "name", "expected"),
    [
        ("cpu", torch.bfloat16, None, "auto", tiles),
        ("cuda", torch.bfloat16, HOPPER, "auto", triton_kernels),
        ("cuda", torch.bfloat16, HOPPER, "torch", tiles),
        ("cuda", torch.bfloat16, HOPPER, "triton", triton_kernels),
        ("cuda", torch.float32, HOPPER, "auto", tiles),
        ("cuda", torch.float64, HOPPER, "auto", tiles),
        ("cuda", torch.bfloat16, AMPERE, "auto", tiles),
        ("cuda", torch.bfloat16, (12, 0), "auto", tiles),
        ("cuda", torch.bfloat16, None, "auto", tiles),  # not NVIDIA
    ],
)
def test_code_by_device(
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    name: str,
    expected: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _choose.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert _choose(device, dtype, capability, name) is expected
    word = "triton" if expected is triton_kernels else "torch"
    (record,) = caplog.records
    assert re.search(mentions(dtype, device, word), record.getMessage())


@pytest.mark.parametrize("capability", [None, AMPERE])
def test_kernels_are_refused_where_they_do_not_serve(capability: tuple[int, int] | None) -> None:
    with pytest.raises(ValueError, match=mentions("triton", "compute capability 9")):
        _choose("cuda", torch.bfloat16, capability, "triton")
    with pytest.raises(ValueError, match=mentions("triton", torch.float32, "cpu")):
        choose_implementation(torch.device("cpu"), torch.float32, "triton")
