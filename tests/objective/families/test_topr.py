"""TOPR by hand, and in the form of ROLL."""

import dataclasses
import math

import pytest
import torch

from gapo_megatron.objective import METHODS
from gapo_megatron.objective.ratio import MAX_LOG_RATIO
from tests.objective.families.response import assert_found, compare, evaluate

TOPR = METHODS["topr"]
TOKEN = dataclasses.replace(TOPR, ratio="token")
# Another taper: 0.5..1.3.
TAPER = dataclasses.replace(TOPR, eps_low=0.5, eps_high_max=0.3)

# (method, advantage, product ratio) -> weight, whether it counts as clipped.
BY_HAND = [
    (TOPR, +0.5, 3.0, 1.0, False),  # right: whatever the ratio
    (TOPR, +0.5, 0.01, 1.0, False),
    (TOPR, -0.5, 1.001, 1.0, True),
    (TOPR, -0.5, 0.999, 0.999, False),
    (TOPR, -0.5, 1e-6, 1e-6, False),  # never none
    (TAPER, +0.5, 3.0, 1.0, False),
    (TAPER, -0.5, 1.301, 1.3, True),
    (TAPER, -0.5, 1.299, 1.299, False),
    (TAPER, -0.5, 0.501, 0.501, False),
    (TAPER, -0.5, 0.499, 0.5, True),
    (TOPR, +0.0, 3.0, 0.0, False),
]


@pytest.mark.parametrize(("method", "advantage", "ratio", "weight", "clipped"), BY_HAND)
def test_both_sides_of_every_bound_by_hand(method, advantage, ratio, weight, clipped):
    old = torch.tensor([0.05, 0.1, 0.03, 0.02], dtype=torch.float64)
    shares = torch.tensor([2.0, -1.0, 0.5, -0.5], dtype=torch.float64)  # of the sum
    new = old * (shares * math.log(ratio)).exp()
    # A right response has no clip that would take from its weight of 1.
    mass = 4 * abs(advantage) * (ratio if advantage < 0 else 1)
    # A sum over tokens, whatever their number.
    assert_found(
        evaluate(method, advantage, new, old),
        loss=-advantage * weight * float(new.log().sum()),
        gradient=[-advantage * weight] * 4,
        ratio=[ratio],
        clipped=[clipped],
        mass=[mass],
        lost=[max(mass - 4 * abs(advantage) * weight, 0)],
    )


def test_a_wrong_response_keeps_a_gradient_however_far_it_fell():
    result, gradient = evaluate(TOPR, -0.5, [0.01] * 60, [0.1] * 60)
    assert gradient.tolist() == pytest.approx([0.5 * math.exp(-MAX_LOG_RATIO)] * 60, rel=1e-11)
    assert result.clipped.tolist() == [False]


def roll(log_probs, old_log_probs, advantage):
    """`_compute_topr_loss` of ROLL, of a response whose score has the sign of its advantage."""
    if advantage > 0:
        return -advantage * log_probs
    ratio = (log_probs - old_log_probs).exp()
    return -ratio.clamp(0, 1).detach() * advantage * log_probs


def algorithm_1(log_probs, old_log_probs, advantage):
    """The paper's algorithm 1, as transcribed: -sg(alpha) R log pi(y | x)."""
    ratio = (log_probs.sum() - old_log_probs.sum()).exp().detach()
    alpha = 1 if advantage > 0 else ratio.clamp(0, 1)
    return (-alpha * advantage * log_probs.sum())[None]


@pytest.mark.parametrize("advantage", [0.75, -0.25])
def test_it_is_the_loss_of_the_paper_and_of_roll(advantage):
    for seed in range(6):
        compare(TOKEN, roll, advantage, seed)
        # Sums of 200 logs of order one, and what their rounding makes of the product.
        compare(TOPR, algorithm_1, advantage, seed, scale=0.02, rounding=1e-11)
