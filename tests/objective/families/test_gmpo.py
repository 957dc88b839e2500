"""GMPO by hand: the clip of one token, what it does to the others, and its edges."""

import dataclasses
import math

import pytest

from gapo_megatron.objective import METHODS
from gapo_megatron.objective.ratio import MAX_LOG_RATIO
from tests.objective.families.response import assert_found, evaluate

GMPO = METHODS["gmpo"]


def of_log_ratios(log_ratios, advantage, method=GMPO, **counts):
    """`evaluate` of one response whose tokens have `log_ratios`."""
    new = [math.exp(value) for value in log_ratios]
    return evaluate(method, advantage, new, [1.0] * len(new), **counts)


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
    mean_ratio = math.exp((entered + 0.1) / 2)
    # d(-A G) / d(log_prob) = -A G / 2 at each of the two tokens.
    slope, whole = -advantage * mean_ratio / 2, 0.5 * math.exp((log_ratio + 0.1) / 2) / 2
    assert_found(
        of_log_ratios([log_ratio, 0.1], advantage),
        loss=-advantage * mean_ratio,
        gradient=[0.0 if clipped else slope, slope],
        ratio=[math.exp(log_ratio), math.exp(0.1)],
        clipped=[clipped, False],
        mass=[whole, whole],
        # Above 1 the clip also lowers the weight of the other token; below 1 it raises it: no loss.
        lost=[whole if clipped else 0, max(whole - 0.5 * mean_ratio / 2, 0)],
    )


def test_bounds_are_those_of_the_width_by_c():
    """Upper widths 0.1 + (0.5 - 0.1) (8 - c) / 7 of correct responses."""
    method = dataclasses.replace(GMPO, adaptive=True, eps_low=0.1, eps_high_max=0.5)
    for num_correct, width in ((1, 0.5), (4, 0.1 + 0.4 * 4 / 7)):
        for away, clipped in ((+1e-3, True), (-1e-3, False)):
            log_ratios = [math.log(1 + width) + away]
            result, _ = of_log_ratios(log_ratios, 0.5, method, num_correct=num_correct)
            assert result.clipped.tolist() == [clipped]


@pytest.mark.parametrize("log_ratio", [500.0, -500.0])
@pytest.mark.parametrize("advantage", [0.5, -0.5])
def test_a_runaway_response_stays_finite_and_is_pulled_back(log_ratio, advantage):
    result, gradient = of_log_ratios([log_ratio, log_ratio], advantage)
    is_held = log_ratio * advantage > 0
    bound = math.copysign(0.4 if is_held else MAX_LOG_RATIO, log_ratio)
    assert float(result.loss.detach()) == pytest.approx(-advantage * math.exp(bound), rel=1e-12)
    expected = 0.0 if is_held else -advantage * math.exp(bound) / 2
    assert gradient.tolist() == pytest.approx([expected] * 2, rel=1e-12)
    assert bool(result.gradient_mass.isfinite().all())


def test_it_is_of_tokens_only():
    with pytest.raises(AssertionError, match="'sequence'"):
        of_log_ratios([0.1], 0.5, dataclasses.replace(GMPO, ratio="sequence"))
