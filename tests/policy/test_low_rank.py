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
