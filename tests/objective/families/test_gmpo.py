"""GMPO by hand: the clip of one token, what it does to the others, and its edges."""

import dataclasses
import math

import pytest
import torch

from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.objective.ratio import MAX_LOG_RATIO

GMPO = METHODS["gmpo"]


def loss_of(log_ratios, advantage, method=GMPO, *, num_correct=4):
    """(result, gradient) of one response whose tokens have `log_ratios`, in a batch of it alone."""
    old = torch.zeros(len(log_ratios), dtype=torch.float64)
    log_probs = (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    result = policy_loss(
        log_probs,
        old,
        sequence_ids=torch.zeros(len(log_ratios), dtype=torch.int64),
        advantages=torch.tensor([advantage]),
        num_correct=torch.tensor([num_correct]),
        group_size=8,
        num_tokens_global=len(log_ratios),
        num_sequences_global=1,
        method=method,
    )
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    return result, gradient


# (advantage, log-ratio of the first of two tokens, what it enters the mean as, clipped)
BY_HAND = [
    (+0.5, 0.401, 0.4, True),
    (+0.5, 0.399, 0.399, False),
    (+0.5, -0.401, -0.401, False),  # fell although correct: never held back
    (-0.5, -0.401, -0.4, True),
    (-0.5, -0.399, -0.399, False),
    (-0.5, 0.401, 0.401, False),  # rose although wrong: never held back
]


@pytest.mark.parametrize(("advantage", "log_ratio", "entered", "clipped"), BY_HAND)
def test_both_bounds_and_both_signs_by_hand(advantage, log_ratio, entered, clipped):
    result, gradient = loss_of([log_ratio, 0.1], advantage)
    mean_ratio = math.exp((entered + 0.1) / 2)
    assert float(result.loss.detach()) == pytest.approx(-advantage * mean_ratio, rel=1e-12)
    # d(-A G) / d(log_prob) = -A G / 2 at each of the two tokens.
    expected = [0.0 if clipped else -advantage * mean_ratio / 2, -advantage * mean_ratio / 2]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)
    assert (float(gradient[0]) == 0) == clipped, "exactly zero"
    assert result.clipped.tolist() == [clipped, False]
    assert result.ratio.tolist() == pytest.approx([math.exp(log_ratio), math.exp(0.1)], rel=1e-12)
    whole = 0.5 * math.exp((log_ratio + 0.1) / 2) / 2
    assert result.gradient_mass.tolist() == pytest.approx([whole, whole], rel=1e-12)
    # Above 1 the clip also lowers the weight of the other token; below 1 it raises it: no loss.
    other = max(whole - 0.5 * mean_ratio / 2, 0)
    lost = [whole if clipped else 0, other]
    assert result.gradient_mass_lost.tolist() == pytest.approx(lost, rel=1e-9, abs=1e-15)


def test_bounds_are_those_of_the_width_by_c():
    """Upper widths 0.1 + (0.5 - 0.1) (8 - c) / 7 of correct responses."""
    method = dataclasses.replace(GMPO, adaptive=True, eps_low=0.1, eps_high_max=0.5)
    for num_correct, width in ((1, 0.5), (4, 0.1 + 0.4 * 4 / 7)):
        for away, clipped in ((+1e-3, True), (-1e-3, False)):
            result, _ = loss_of([math.log(1 + width) + away], 0.5, method, num_correct=num_correct)
            assert result.clipped.tolist() == [clipped]


@pytest.mark.parametrize("log_ratio", [500.0, -500.0])
@pytest.mark.parametrize("advantage", [0.5, -0.5])
def test_a_runaway_response_stays_finite_and_is_pulled_back(log_ratio, advantage):
    result, gradient = loss_of([log_ratio, log_ratio], advantage)
    is_held = log_ratio * advantage > 0
    bound = math.copysign(0.4 if is_held else MAX_LOG_RATIO, log_ratio)
    assert float(result.loss.detach()) == pytest.approx(-advantage * math.exp(bound), rel=1e-12)
    expected = 0.0 if is_held else -advantage * math.exp(bound) / 2
    assert gradient.tolist() == pytest.approx([expected] * 2, rel=1e-12)
    assert bool(result.gradient_mass.isfinite().all())


def test_it_is_of_tokens_only():
    with pytest.raises(AssertionError, match="'sequence'"):
        loss_of([0.1], 0.5, dataclasses.replace(GMPO, ratio="sequence"))
