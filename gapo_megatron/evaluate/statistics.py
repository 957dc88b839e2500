"""Intervals and tests for comparing runs: Student's t, over seeds or over problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the bounds of its confidence interval, in the unit of the values."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Student-t interval of the mean of independent values (one per seed).

    Raises:
        ValueError: fewer than two values: one says nothing about its spread.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        raise ValueError(f"an interval needs at least two values, not {len(sample)}")
    mean = float(sample.mean())
    error = float(sample.std(ddof=1)) / len(sample) ** 0.5
    half = error * float(stats.t.ppf(0.5 + confidence / 2, df=len(sample) - 1))
    return Interval(mean, mean - half, mean + half)


def paired_difference(
    before: Sequence[float], after: Sequence[float], *, confidence: float = 0.95
) -> Interval:
    """Student-t interval of the mean of `after - before`, value by value.

    Pairs are the same problems under two models, or the same seeds before and after training;
    pairing takes out how hard each problem is.

    Raises:
        ValueError: unequal lengths, or fewer than two pairs.
    """
    if len(before) != len(after):
        raise ValueError(f"pairs need equal lengths, not {len(before)} and {len(after)}")
    return mean_interval(
        np.subtract(after, before, dtype=np.float64).tolist(), confidence=confidence
    )


def welch_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of Welch's t-test: equal means, unequal variances, independent values."""
    return float(stats.ttest_ind(first, second, equal_var=False).pvalue)
