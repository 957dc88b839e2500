"""Products by oneDNN: the same as torch's, in every layout in which they are asked for."""

from __future__ import annotations

import pytest
import torch

from gapo_megatron.compat import cpu, onednn
from gapo_megatron.logprob import tiles


@pytest.fixture(autouse=True)
def _any_size_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_SMALLEST", 1)
    monkeypatch.setattr(onednn, "_is_faster", lambda: True)


LEFT = torch.randn(192, 64, generator=torch.Generator().manual_seed(0))
RIGHT = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("left", [LEFT, LEFT.t().contiguous().t(), LEFT.view(3, 64, 64)])
@pytest.mark.parametrize("right", [RIGHT, RIGHT.t().contiguous().t()])
def test_any_layout(left: torch.Tensor, right: torch.Tensor) -> None:
    product = onednn.mm(left, right)
    assert product is not None and product.shape == (*left.shape[:-1], 40)
    torch.testing.assert_close(product.double(), left.double() @ right.double(), rtol=0, atol=2e-5)


def test_what_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    learns = LEFT.clone().requires_grad_()
    assert onednn.mm(learns, RIGHT) is None
    with torch.no_grad():
        assert onednn.mm(learns, RIGHT) is not None
    assert onednn.mm(LEFT.double(), RIGHT.double()) is None
    assert onednn.mm(LEFT.bfloat16(), RIGHT.bfloat16()) is None
    assert onednn.mm(LEFT.to("meta"), RIGHT.to("meta")) is None
    assert onednn.mm(LEFT, RIGHT[:, 0]) is None
    monkeypatch.setattr(onednn, "_SMALLEST", 192 * 64 * 40 + 1)
    assert onednn.mm(LEFT, RIGHT) is None


@pytest.mark.parametrize("overwrite", [False, True])
def test_gradients_of_the_head_are_added_or_written(*, overwrite: bool) -> None:
    total = torch.full((192, 40), torch.nan if overwrite else 1.0)
    tiles.add_product_(total, LEFT, RIGHT, overwrite=overwrite)
    expected = LEFT.double() @ RIGHT.double() + (0 if overwrite else 1)
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=2e-5)


def test_logits_in_memory_that_is_given() -> None:
    out = torch.empty(192, 40)
    z = tiles._logits(LEFT, RIGHT.t(), 0.5, out=out)
    assert z.data_ptr() == out.data_ptr()
    torch.testing.assert_close(z.double(), LEFT.double() @ RIGHT.double() / 2, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layers_on_the_emulated_device_multiply_so(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marked(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        assert left.dtype == right.dtype == torch.float32
        return left @ right + 1

    monkeypatch.setattr(onednn, "mm", marked)
    left, right = LEFT.to(dtype), RIGHT.to(dtype)
    with cpu.emulation():
        found = left.matmul(right)
    assert torch.equal(found, marked(left.float(), right.float()).to(dtype))
