"""CPU emulation: patches what Megatron-core sees, and nothing else, and leaves no trace."""

from __future__ import annotations

import logging
import operator
import sys
from typing import Any
from unittest.mock import patch

import megatron.core.pipeline_parallel.schedules as schedules
import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from gapo_megatron.compat import cpu
from gapo_megatron.errors import GapoError


def fingerprint() -> dict[str, Any]:
    """Identity of everything the emulation could have replaced."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") or name in ("torch", "torch.cuda"):
            found |= {f"{name}.{key}": id(value) for key, value in vars(module).items()}
    for owner in (torch.Tensor, torch.nn.Module):
        found |= {f"{owner.__name__}.{key}": id(value) for key, value in vars(owner).items()}
    return found


def test_everything_is_put_back() -> None:
    before = fingerprint()
    with cpu.emulation():
        inside = fingerprint()
    assert fingerprint() == before
    changed = {name for name in inside if inside[name] != before.get(name)}
    assert "megatron.core.pipeline_parallel.schedules.torch" in changed
    # torch itself is not touched, four methods aside: vLLM and Inductor may run at any time.
    outside = {name for name in changed if not name.startswith("megatron.core")}
    assert outside == {"Tensor.cuda", "Tensor.type", "Tensor.matmul", "Module.cuda"}


def test_everything_is_put_back_after_an_exception() -> None:
    before = fingerprint()
    with pytest.raises(ZeroDivisionError), cpu.emulation(), cpu.emulation():
        raise ZeroDivisionError
    assert fingerprint() == before


def test_levels_nest() -> None:
    before = fingerprint()
    with cpu.emulation():
        outer = fingerprint()
        with cpu.emulation():
            assert fingerprint() == outer
        assert fingerprint() == outer
    assert fingerprint() == before


def test_megatron_finds_a_device() -> None:
    with cpu.emulation():
        seen = schedules.torch
        for device in ("cuda", "cuda:0", 0, torch.device("cuda"), seen.cuda.current_device()):
            assert seen.zeros(2, device=device).device.type == "cpu"
        assert seen.tensor([1], device="cuda", pin_memory=True).device.type == "cpu"
        assert seen.ones(1).cuda().type() == "torch.cuda.FloatTensor"
        assert isinstance(seen.ones(1), seen.Tensor)
        with seen.cuda.stream(seen.cuda.Stream()):
            seen.cuda.synchronize()
        assert torch.zeros(1).device.type == "cpu"
        with pytest.raises((AssertionError, RuntimeError)):  # the real one still has no GPU
            torch.zeros(1, device="cuda")


@pytest.mark.parametrize("name", ["matmul", "Tensor.matmul", "bmm", "baddbmm"])
def test_products_of_float16_are_exact_until_they_are_rounded(name: str) -> None:
    """Megatron-core multiplies by `torch`'s functions forward, by the tensor's method backward."""
    random = torch.Generator().manual_seed(0)
    left = torch.randn(2, 33, 64, generator=random).half().requires_grad_()
    right = torch.randn(2, 64, 17, generator=random).half()
    factors = [torch.ones(2, 33, 17).half()] * (name == "baddbmm") + [left, right]
    expected = (left.double() @ right.double() + (name == "baddbmm")).float().half()
    with cpu.emulation():
        product = operator.attrgetter(name)(schedules.torch)(*factors)
    # Sums in float32 are rounded to another neighbour once in a while.
    assert product.dtype == torch.float16 and (product != expected).float().mean() < 0.01
    assert product.grad_fn.name() == "ToCopyBackward0"  # rounded behind the product, not in it
    torch.testing.assert_close(product, expected, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_multiplied_in_float32(dtype: torch.dtype, *, has_instructions: bool) -> None:
    seen = []

    def product(left: torch.Tensor, right: torch.Tensor, **options: int) -> torch.Tensor:
        seen.extend([left.dtype, right.dtype, options])
        return left @ right

    multiply, one = cpu._rounds_once(product), torch.ones(2, 2, dtype=dtype)
    with patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=has_instructions):
        assert multiply(one, one, beta=0).dtype == dtype
    is_native = dtype == torch.float32 or (dtype == torch.bfloat16 and has_instructions)
    assert seen == [dtype if is_native else torch.float32] * 2 + [{"beta": 0}]
    with pytest.raises(RuntimeError, match="dtype"):  # as torch has it
        multiply(one, torch.ones(2, 2, dtype=torch.float64))


def test_the_emulated_random_state_is_apart_from_the_real_one() -> None:
    before = torch.get_rng_state()
    with cpu.emulation():
        megatron_random.torch.cuda.manual_seed(3)
        state = megatron_random._get_cuda_rng_state()
        megatron_random.torch.cuda.manual_seed(4)
        megatron_random._set_cuda_rng_state(state)
        assert torch.equal(megatron_random._get_cuda_rng_state(), state)
    assert torch.equal(torch.get_rng_state(), before)


def test_refused_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = fingerprint()
    with pytest.raises(GapoError, match="CUDA"), cpu.emulation():
        pass
    assert fingerprint() == before
    with cpu.device_scope():  # what the policy uses: nothing, where there is a GPU
        assert fingerprint() == before


def test_says_once_that_it_is_active(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "_announced", False)
    with caplog.at_level(logging.WARNING, logger="gapo_megatron"):
        for _ in range(2):
            with cpu.emulation():
                pass
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "CPU" in caplog.text
