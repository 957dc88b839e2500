"""An optimizer's state leaves its device and comes back; `test_policy_one_rank` has a policy's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gapo_megatron.policy.offload import Offload

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def make(device: str) -> tuple[Tensor, list[Tensor], torch.optim.AdamW]:
    """Weights, what is optimized (a view of half of them, and a master of its own), AdamW."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1 << 12, generator=generator).to(device)
    parameters = [weights[: 1 << 11], weights[1 << 11 :].clone()]
    for parameter in parameters:
        parameter.requires_grad_()
    return weights, parameters, torch.optim.AdamW(parameters, lr=0.1)


def step(parameters: list[Tensor], adam: torch.optim.AdamW) -> None:
    for parameter in parameters:
        parameter.grad = parameter.detach().sin()
    adam.step()


@pytest.mark.parametrize("device", DEVICES)
def test_updates_are_the_same_bits(device: str) -> None:
    found = []
    for leaves in (False, True):
        weights, parameters, adam = make(device)
        offload = Offload([adam], [weights])
        for _ in range(3):
            if leaves:
                offload.to_host()
                offload.to_host()
                away = [parameters[1], *(s["exp_avg"] for s in adam.state.values())]
                assert all(one.device.type == "cpu" for one in away)
                offload.to_device()
                offload.to_device()
                assert all(one.device.type == device for one in away)
            step(parameters, adam)
        assert parameters[0].data_ptr() == weights.data_ptr()
        found.append([weights, *parameters])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("device", DEVICES[1:])
def test_its_memory_is_given_back(device: str) -> None:
    weights, parameters, adam = make(device)
    step(parameters, adam)
    for parameter in parameters:
        parameter.grad = None
    offload, before = Offload([adam], [weights]), torch.cuda.memory_allocated()
    offload.to_host()
    # Two moments of all parameters, and the one master.
    assert before - torch.cuda.memory_allocated() == 4 * (2 * (1 << 12) + (1 << 11))
    offload.to_device()
    assert torch.cuda.memory_allocated() == before
