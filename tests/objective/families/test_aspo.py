"""ASPO by hand, and in the form of its authors' code."""

import dataclasses

import pytest
import torch

from gapo_megatron.objective import METHODS
from tests.objective.families.response import assert_found, compare, evaluate, random_tokens

ASPO = METHODS["aspo"]
# Its two widths told apart.
WIDER_UP = dataclasses.replace(ASPO, eps_high_max=0.28)

# (advantage, ratio) -> weight in the loss, whether masked.
BY_HAND = [
    (+0.5, 1.281, 1 / 1.28, True),
    (+0.5, 1.279, 1 / 1.279, False),
    (+0.5, 0.5, 2.0, False),  # lags: pulled the harder
    (+0.5, 0.334, 1 / 0.334, False),
    (+0.5, 0.333, 3.0, False),  # capped, with a gradient
    (+0.5, 1e-3, 3.0, False),
    (-0.5, 0.799, 0.8, True),
    (-0.5, 0.801, 0.801, False),
    (-0.5, 2.999, 2.999, False),
    (-0.5, 3.001, 3.0, False),  # capped, with a gradient
    (-0.5, 9.0, 3.0, False),
]


@pytest.mark.parametrize(("advantage", "ratio", "weight", "clipped"), BY_HAND)
def test_both_sides_of_every_bound_by_hand(advantage, ratio, weight, clipped):
    slope = 0 if clipped else advantage * weight
    mass = abs(advantage) / 2 * (1 / ratio if advantage > 0 else ratio)
    # The mean over two tokens; the other one is where it was.
    assert_found(
        evaluate(WIDER_UP, advantage, [0.1 * ratio, 0.5], [0.1, 0.5]),
        loss=-advantage * (weight + 1) / 2,
        gradient=[-slope / 2, -advantage / 2],
        ratio=[ratio, 1],
        clipped=[clipped, False],
        mass=[mass, abs(advantage) / 2],
        lost=[mass - abs(slope) / 2, 0],
    )


def test_nothing_is_learnt_where_the_advantage_is_zero():
    result, gradient = evaluate(ASPO, 0.0, [0.9, 0.01], [0.3, 0.3])
    assert not gradient.any() and not result.clipped.any() and not result.gradient_mass.any()


def authors(log_probs, old_log_probs, advantage):
    """`compute_policy_loss_archer` of Archer2.0, both widths 0.2 for every token."""
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    capped = -advantage * 3 * log_probs
    if advantage < 0:
        bounded = torch.clamp(ratio, min=0.8)
        return torch.where(bounded <= 3, -advantage * bounded, capped)
    bounded = torch.clamp(ratio, max=1.2)
    inverse = (bounded / bounded.detach()) / bounded.detach()
    return torch.where(1 / bounded <= 3, -advantage * inverse, capped)


def with_our_values(log_probs, old_log_probs, advantage):
    """The same gradients; beyond the cap the value -3 A, where theirs has another scale."""
    losses = authors(log_probs, old_log_probs, advantage)
    ratio = (log_probs - old_log_probs).detach().exp()
    is_capped = (1 / ratio if advantage > 0 else ratio) > 3
    return losses - torch.where(is_capped, losses + 3 * advantage, 0).detach()


@pytest.mark.parametrize("advantage", [0.75, -0.25])
def test_it_is_the_loss_of_the_authors(advantage):
    for seed in range(5):
        result = compare(ASPO, with_our_values, advantage, seed, scale=2.0)
        assert 0 < int(result.clipped.sum()) < len(result.clipped)
        compare(ASPO, authors, advantage, seed, scale=0.2)  # where none is capped
        log_probs, old = random_tokens(seed, scale=0.2)
        assert float((log_probs - old).detach().abs().max()) < 1.09
