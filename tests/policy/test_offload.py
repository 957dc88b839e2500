"""State and weights leave their device and come back; `test_policy_one_rank` has a policy's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gapo_megatron.policy.allocator import ExpandableSegments
from gapo_megatron.policy.offload import Offload, WeightOffload, _on_host

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


@pytest.mark.parametrize("device", DEVICES)
def test_weights_come_back_to_all_that_are_views_of_them(device: str) -> None:
    buffer = torch.randn(1 << 12, generator=torch.Generator().manual_seed(0)).to(device)
    weights = [buffer[8:24].view(4, 4).requires_grad_(), buffer[1 << 11 :].requires_grad_()]
    view, other = weights[1].detach()[4:12], torch.zeros(4, device=device)
    adam = torch.optim.AdamW([view, other])
    before, expected = weights[0].untyped_storage(), buffer.clone()
    offload = WeightOffload(weights, [adam])
    for _ in range(3):
        offload.to_host()
        offload.to_host()
        assert offload.is_away and before.nbytes() == 0
        # Who writes a checkpoint finds the values.
        assert torch.equal(view.cpu(), expected[(1 << 11) + 4 :][:8].cpu())
        assert view.device.type == "cpu" and offload.readable(other) is other
        assert torch.equal(offload.readable(weights[0]), expected[8:24].view(4, 4).cpu())
        offload.to_device()
        offload.to_device()
        assert not offload.is_away and torch.equal(buffer, expected)
        assert offload.readable(weights[0]) is weights[0]
        # One memory again.
        with torch.no_grad():
            view += 1
            expected[(1 << 11) + 4 :][:8] += 1
        assert torch.equal(weights[1], expected[1 << 11 :])
        assert weights[0].untyped_storage().data_ptr() == before.data_ptr() == buffer.data_ptr()


def test_an_update_after_a_return_reaches_the_hooks_of_gradients() -> None:
    """Megatron-core adds gradients to its buffer in such hooks: a `data` that moves loses them."""
    buffer = torch.ones(8)
    weight, seen = torch.nn.Parameter(buffer[:4]), []
    accumulates = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulates.register_hook(lambda *_: seen.append(1))
    offload = WeightOffload([weight])
    offload.to_host()
    offload.to_device()
    (weight * 2).sum().backward()
    assert seen == [1]


def test_the_host_has_one_allocation_of_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    locked, unlocked = [], []
    utils = "torch.cuda._pin_memory_utils"
    monkeypatch.setattr(f"{utils}.pin_memory", lambda *where: locked.append(where))
    monkeypatch.setattr(f"{utils}.unpin_memory", unlocked.append)

    class OnGpu:
        """As much of a tensor on a GPU as is asked."""

        is_cuda = True

        def __init__(self, tensor: Tensor) -> None:
            self.nbytes, self.dtype, self.shape = tensor.nbytes, tensor.dtype, tensor.shape

    shapes = {(3, 5): torch.float32, (1000,): torch.bfloat16, (0, 2): torch.float32}
    like = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes.items()]
    found = _on_host([OnGpu(one) for one in like])
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in like]
    storage = found[0].untyped_storage()
    assert all(one.untyped_storage().data_ptr() == storage.data_ptr() for one in found)
    # 60 and 2000 bytes, each up to the next multiple of 512.
    assert locked == [(storage.data_ptr(), 512 + 2048)]
    _on_host(like)
    _on_host([])
    assert len(locked) == 1
    # Whoever is the last to use the memory: then it is unlocked, once.
    address, last = storage.data_ptr(), found[1][10:20]
    del found, storage
    assert unlocked == []
    del last
    assert unlocked == [address]


def test_segments_expand_for_the_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["max_split_size_mb:512"]
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    cuda = torch.device("cuda", 0)
    segments = ExpandableSegments(cuda)
    for enabled in (True, False, True):
        segments.use(enabled)
        assert settings[-1] == f"max_split_size_mb:512,expandable_segments:{enabled}"
    # The environment's word, no device, and a torch that cannot be asked.
    del settings[:-1]
    ExpandableSegments(cuda).use(False)
    settings[:] = [""]
    ExpandableSegments(torch.device("cpu")).use(True)
    ExpandableSegments(cuda).use(True)
    assert settings == ["", "expandable_segments:True"]
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    ExpandableSegments(cuda).use(True)
    assert len(settings) == 2
