"""FSPO by hand, and in the form of the third party that the equation is from."""

import dataclasses
import math

import pytest
import torch

from gapo_megatron.objective import METHODS
from gapo_megatron.objective.ratio import MAX_LOG_RATIO
from tests.objective.families.response import assert_found, compare, evaluate

# Its two constants told apart: of 4 tokens, -0.06..0.1.
FSPO = dataclasses.replace(METHODS["fspo"], eps_high_max=0.05)
MEAN = dataclasses.replace(FSPO, ratio="sequence")

# (advantage, sum of log-ratios) -> the sum that the loss takes, whether clipped.
BY_HAND = [
    (+0.5, 0.1001, 0.1, True),
    (+0.5, 0.0999, 0.0999, False),
    (+0.5, -0.3, -0.3, False),  # fell although right: never held back
    (-0.5, -0.0601, -0.06, True),
    (-0.5, -0.0599, -0.0599, False),
    (-0.5, 0.3, 0.3, False),  # rose although wrong: never held back
    (+0.0, 0.3, 0.3, False),
]


@pytest.mark.parametrize("method", [FSPO, MEAN], ids=["product", "mean"])
@pytest.mark.parametrize(("advantage", "total", "taken", "clipped"), BY_HAND)
def test_both_sides_of_every_bound_by_hand(method, advantage, total, taken, clipped):
    old = torch.tensor([0.5, 0.1, 0.3, 0.2], dtype=torch.float64)
    shares = torch.tensor([2.0, -1.0, 0.5, -0.5], dtype=torch.float64)  # of the sum
    # The mean's loss is carried by each of the 4 tokens.
    divisor, copies = (4, 4) if method is MEAN else (1, 1)
    ratio = math.exp(total / divisor)
    weight, mass = 0 if clipped else advantage * ratio, 4 * abs(advantage) * ratio
    assert_found(
        evaluate(method, advantage, old * (shares * total).exp(), old),
        loss=-advantage * math.exp(taken / divisor) * copies,
        gradient=[-weight] * 4,
        ratio=[ratio],
        clipped=[clipped],
        mass=[mass],
        lost=[mass * clipped],
    )


@pytest.mark.parametrize("length", [1, 25, 400])
def test_the_band_widens_with_the_root_of_the_length(length):
    method, edge = METHODS["fspo"], 0.03 * math.sqrt(length)
    for total, clipped in ((1.001 * edge, True), (0.999 * edge, False)):
        old = torch.full((length,), 0.1, dtype=torch.float64)
        new = old * math.exp(total / length)
        result, _ = evaluate(method, 0.5, new, old)
        assert result.clipped.tolist() == [clipped]


@pytest.mark.parametrize("advantage", [0.5, -0.5])
def test_a_product_out_of_all_bounds_stays_finite(advantage):
    """60 tokens that each rose, or fell, by two nats: exp(120) would swamp a gradient."""
    up = 0.1 * math.exp(2), 0.1
    for new, old, total in ((*up, MAX_LOG_RATIO), (*up[::-1], -MAX_LOG_RATIO)):
        result, gradient = evaluate(FSPO, advantage, [new] * 60, [old] * 60)
        assert result.ratio.tolist() == pytest.approx([math.exp(total)], rel=1e-12)
        clipped = advantage * total > 0
        assert result.clipped.tolist() == [clipped]
        weight = 0 if clipped else advantage * math.exp(total)
        assert gradient.tolist() == pytest.approx([-weight] * 60, rel=1e-11)


def third_party(log_probs, old_log_probs, advantage):
    """`_clipped_sequence_objective` of quantumglass/GRPO-series, of one response."""
    total = (log_probs - old_log_probs).sum()
    root = len(log_probs) ** 0.5
    bounded = total.clamp(-0.03 * root, 0.05 * root)
    return -torch.minimum(total.exp() * advantage, bounded.exp() * advantage)[None]


@pytest.mark.parametrize("advantage", [0.75, -0.25])
def test_it_is_the_loss_of_the_third_party(advantage):
    flags = [
        compare(FSPO, third_party, advantage, seed, scale=scale).clipped.item()
        for seed in range(8)
        for scale in (0.01, 0.1)
    ]
    assert {True, False} == set(flags)
