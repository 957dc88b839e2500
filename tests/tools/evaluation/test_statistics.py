"""Intervals and paired comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gapo_tools.evaluation.statistics import mean_interval, paired_difference
from tests.messages import mentions


def test_mean_interval_by_hand():
    interval = mean_interval([1.0, 2.0, 3.0])
    # t(0.975, 2) = 4.302653 (tables), standard error 1/sqrt(3); scipy's quantile to 1e-6 of it.
    assert interval.mean == 2.0
    assert interval.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval.low == pytest.approx(4.0 - interval.high)
    assert not interval.excludes_zero
    assert mean_interval([1.0, 1.1, 1.2]).excludes_zero
    assert mean_interval([-1.0, -1.1, -1.2]).excludes_zero


def test_pairing_takes_out_how_hard_a_problem_is():
    before = np.linspace(0, 0.8, 50)
    after = before + 0.1 + 0.01 * np.random.default_rng(0).normal(size=50)
    interval = paired_difference(before.tolist(), after.tolist())
    assert interval.low < 0.1 < interval.high and interval.excludes_zero
    expected = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_intervals_refuse_what_has_no_spread():
    with pytest.raises(ValueError, match=mentions("two", 1)):
        mean_interval([1.0])
    with pytest.raises(ValueError, match=mentions("lengths", 2, 3)):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
