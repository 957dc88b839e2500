import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron.errors import ConfigError
from gapo_megatron.objective import METHODS, upper_clip
from tests.messages import mentions


def test_values_of_the_paper():
    """k = 8, eps_low 3e-3, eps_high_max 5e-3, c = 1..7, rounded to the digits given."""
    widths = upper_clip(torch.arange(1, 8), group_size=8, eps_low=3e-3, eps_high_max=5e-3)
    expected = [5.0, 4.714, 4.429, 4.143, 3.857, 3.571, 3.286]
    assert widths.dtype == torch.float64
    assert [round(float(width) * 1e3, 3) for width in widths] == expected


def test_without_a_floor_the_width_is_proportional_to_the_advantage():
    """Of a correct rollout: A = 1 - c/k."""
    k, c = 8, torch.arange(1, 9)
    proportional, floored = (
        upper_clip(
            c, group_size=k, eps_low=METHODS[name].floor, eps_high_max=METHODS[name].eps_high_max
        ).tolist()
        for name in ("gapo_proportional", "gapo")
    )
    advantages = [1 - c / k for c in range(1, k + 1)]
    scale = 5e-3 / advantages[0]
    assert proportional == pytest.approx([scale * one for one in advantages])
    assert proportional[0] / proportional[6] == pytest.approx(7)
    assert floored[0] / floored[6] == pytest.approx(1.52, abs=5e-3)


@given(
    group_size=st.integers(2, 64),
    eps_low=st.floats(1e-5, 0.3),
    extra=st.floats(0, 0.3),
)
def test_interpolates_from_the_rarest_to_the_commonest(group_size, eps_low, extra):
    eps_high_max = eps_low + extra
    c = torch.arange(group_size + 1)
    widths = upper_clip(c, group_size=group_size, eps_low=eps_low, eps_high_max=eps_high_max)
    rounding = 1e-15  # a few float64 roundings of numbers below 1
    assert float(widths[1]) == pytest.approx(eps_high_max, abs=rounding)
    assert float(widths[-1]) == eps_low
    assert float(widths[0]) == float(widths[1]), "c = 0 must not exceed the largest width"
    assert bool((widths.diff() <= 0).all()), "more correct rollouts, less headroom"
    for number in range(1, group_size + 1):
        share = (group_size - number) / (group_size - 1)
        expected = eps_low + (eps_high_max - eps_low) * share
        assert float(widths[number]) == pytest.approx(expected, abs=rounding)


def test_group_size_may_differ_between_sequences():
    """An unknown verdict shrinks k; c and k stay integers of their own group."""
    widths = upper_clip(
        torch.tensor([1, 1, 3]),
        group_size=torch.tensor([8, 4, 7]),
        eps_low=0.2,
        eps_high_max=0.28,
    )
    # The float64 rounding of numbers below 1.
    assert widths.tolist() == pytest.approx([0.28, 0.28, 0.2 + 0.08 * 4 / 6], abs=1e-15)


def test_refuses_one_rollout_and_crossed_widths():
    with pytest.raises(ConfigError, match=r"\bgroup_size\b.*\b1\b"):
        upper_clip(torch.tensor([1]), group_size=1, eps_low=3e-3, eps_high_max=5e-3)
    with pytest.raises(ConfigError, match=mentions("eps_high_max", 0.1, "eps_low", 0.2)):
        upper_clip(torch.tensor([1]), group_size=8, eps_low=0.2, eps_high_max=0.1)
