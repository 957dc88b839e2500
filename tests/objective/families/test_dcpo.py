"""DCPO by hand, and in the form of its authors' code."""

import math

import pytest
import torch

from gapo_megatron.objective import METHODS
from tests.objective.families.response import assert_found, compare, evaluate, loss_of

DCPO = METHODS["dcpo"]
# q = 0.8: hi = (1 + sqrt(2)) / 2, lo = (1 + sqrt(0.2)) / 2.
HIGH, LOW = (1 + math.sqrt(2)) / 2, (1 + math.sqrt(0.2)) / 2

# (advantage, old probability, ratio) -> the ratio that the loss takes, whether clipped.
BY_HAND = [
    (+0.5, 0.8, 1.208, HIGH, True),  # hi is 1.2071
    (+0.5, 0.8, 1.207, 1.207, False),
    (+0.5, 0.8, 0.1, 0.1, False),  # fell although right: never held back
    (-0.5, 0.8, 0.723, LOW, True),  # lo is 0.7236
    (-0.5, 0.8, 0.724, 0.724, False),
    (-0.5, 0.8, 1.24, 1.24, False),  # rose although wrong, above hi
    (+0.5, 0.1, 2.001, 2.0, True),  # a rare token may double
    (+0.5, 0.1, 1.999, 1.999, False),
    (-0.5, 0.64, 0.499, 0.5, True),  # lo is 0.5 from q = 4 eps_low down
    (-0.5, 0.1, 0.499, 0.5, True),
    (-0.5, 0.1, 0.501, 0.501, False),
    (+0.5, 1e-3, 10.01, 10.0, True),  # hi would be 14.7
    (+0.5, 1e-3, 9.99, 9.99, False),
    (-0.5, 1e-3, 10.01, 10.0, True),
    (-0.5, 1e-3, 9.99, 9.99, False),
    (+0.0, 0.8, 1.24, 1.24, False),
    (+0.0, 1e-3, 20.0, 20.0, False),
]


@pytest.mark.parametrize(("advantage", "old", "ratio", "taken", "clipped"), BY_HAND)
def test_both_sides_of_every_bound_by_hand(advantage, old, ratio, taken, clipped):
    weight, mass = 0 if clipped else advantage * ratio, abs(advantage) * ratio / 2
    # The mean over two tokens; the other one is where it was.
    assert_found(
        evaluate(DCPO, advantage, [old * ratio, 0.5], [old, 0.5]),
        loss=-advantage * (taken + 1) / 2,
        gradient=[-weight / 2, -advantage / 2],
        ratio=[ratio, 1],
        clipped=[clipped, False],
        mass=[mass, abs(advantage) / 2],
        lost=[mass * clipped, 0],
    )


@pytest.mark.parametrize("advantage", [0.5, -0.5])
def test_an_old_probability_of_zero_has_bounds(advantage):
    """exp(-800) is 0 in float64."""
    old = torch.tensor([-800.0, -800.0], dtype=torch.float64)
    ratios = torch.tensor([5.0, 20.0], dtype=torch.float64)
    log_probs = (old + ratios.log()).requires_grad_()
    result = loss_of(DCPO, advantage, log_probs, old)
    assert result.clipped.tolist() == [False, True]
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert gradient.tolist() == pytest.approx([-advantage * 5 / 2, 0], rel=1e-11)


def authors(log_probs, old_log_probs, advantage):
    """`compute_policy_loss_dcpo` of lime-RL/DCPO, clip_type "dynamic", its cap at 10."""
    old = old_log_probs.exp()
    low = 0.5 + 0.5 * torch.sqrt(torch.clamp(1 - 4 * 0.16 / old, min=0))
    high = torch.clamp(0.5 + 0.5 * torch.sqrt(1 + 4 * 0.2 / old), max=10)
    ratio = (log_probs - old_log_probs).exp()
    bounded = torch.minimum(torch.maximum(ratio, low), high)
    losses = torch.maximum(-advantage * ratio, -advantage * bounded)
    if advantage < 0:
        losses = torch.minimum(losses, torch.full_like(losses, -advantage * 10))
    return losses


@pytest.mark.parametrize("advantage", [0.75, -0.25])
def test_it_is_the_loss_of_the_authors(advantage):
    for seed in range(5):
        result = compare(DCPO, authors, advantage, seed, scale=2.0)
        assert 0 < int(result.clipped.sum()) < len(result.clipped)
