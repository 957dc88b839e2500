"""Merging of factors into a weight, and what its rounding costs."""

import pytest
import torch

from gapo_megatron.policy.low_rank import merge, merge_squares, relative_rounding


def test_an_update_below_half_a_unit_in_the_last_place_is_lost_as_a_whole() -> None:
    weight, a = torch.ones(2, 2).bfloat16(), torch.ones(1, 2)
    for size, scale, expected in ((2.0**-10, 1.0, 1), (2.0**-7, 0.75, 1 / 3), (0.0, 1.0, 0)):
        b = torch.full((2, 1), size)
        merged = merge(weight, a, b, scale=scale)
        assert merged.dtype == torch.bfloat16 and merged.equal(weight) == (size < 2.0**-7)
        squares = merge_squares(weight, a, b, scale=scale)
        assert relative_rounding(squares) == pytest.approx(expected)  # 0.75 units become 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_weight_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(*shape, generator=generator) for shape in ((64, 48), (8, 48), (64, 8))
    )
    merged = merge(weight.to(dtype), a, b, scale=0.37)
    exact = (weight.to(dtype).double() + 0.37 * (b.double() @ a.double())).to(dtype)
    differs = (merged != exact).double().mean()
    assert differs <= (0 if dtype == torch.float32 else 1e-3)
