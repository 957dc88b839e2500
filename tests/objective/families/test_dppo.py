"""DPPO by hand, and in the form of verl."""

import dataclasses
import math

import pytest

from gapo_megatron.objective import METHODS
from tests.objective.families.response import assert_found, compare, evaluate

DPPO = METHODS["dppo_tv"]
# Its two widths told apart.
WIDER_DOWN = dataclasses.replace(DPPO, eps_low=0.2)

# (advantage, old probability, new probability) -> weight; None: masked.
BY_HAND = [
    (+0.5, 0.5, 0.6501, None),  # rises by more than 0.15
    (+0.5, 0.5, 0.6499, 1.2998),
    (+0.5, 0.5, 0.1, 0.2),  # fell although right: never masked
    (-0.5, 0.5, 0.2999, None),  # falls by more than 0.2
    (-0.5, 0.5, 0.3001, 0.6002),
    (-0.5, 0.5, 0.9, 1.8),  # rose although wrong: never masked
    (+0.5, 0.01, 0.0501, 5.0),  # the ratio is 5.01, the difference 0.04
    (+0.5, 0.01, 0.0499, 4.99),
    (-0.5, 0.01, 0.0501, 5.0),
    (-0.5, 0.01, 0.0499, 4.99),
    (+0.5, 0.02, 0.1701, None),  # masked before it is bounded
    (-0.5, 0.19, 1e-6, 1e-6 / 0.19),  # too rare to fall by 0.2
    (+0.0, 0.5, 0.9, 0.0),
]


@pytest.mark.parametrize(("advantage", "old", "new", "weight"), BY_HAND)
def test_both_sides_of_every_bound_by_hand(advantage, old, new, weight):
    slopes, mass = [-advantage * (weight or 0), -advantage], abs(advantage) * new / old
    assert_found(
        evaluate(WIDER_DOWN, advantage, [new, 0.5], [old, 0.5]),
        loss=slopes[0] * math.log(new) + slopes[1] * math.log(0.5),
        gradient=slopes,
        ratio=[new / old, 1],
        clipped=[weight is None, False],
        mass=[mass, abs(advantage)],
        lost=[mass - abs(slopes[0]), 0],
    )


def verl(log_probs, old_log_probs, advantage):
    """`compute_policy_loss_dppo_tv` of verl: -A sg(min(r, C)) m log pi."""
    log_ratio = (log_probs - old_log_probs).clamp(-20, 20)
    ratio = log_ratio.exp().clamp(max=5.0).detach()
    difference = log_probs.exp() - old_log_probs.exp()
    valid = difference <= 0.15 if advantage > 0 else difference >= -0.15
    return -advantage * ratio * log_probs * valid.detach()


@pytest.mark.parametrize("advantage", [0.75, -0.25])
def test_it_is_the_loss_of_verl(advantage):
    for seed in range(5):
        result = compare(DPPO, verl, advantage, seed, scale=2.0)
        assert 0 < int(result.clipped.sum()) < len(result.clipped)
