"""Counts, intervals and tests for comparing runs: Student's t, over seeds or over problems."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

SOLVED_ABOVE = 0.05
"""The paper counts problems with a solve rate above this."""


def num_solved(rates: Iterable[float]) -> int:
    """Number of problems with a solve rate above `SOLVED_ABOVE`; NaN (no known verdict) is not."""
    return sum(rate > SOLVED_ABOVE for rate in rates)


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
        ValueError: fewer than two values, which have no spread.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        raise ValueError(f"an interval needs at least two values, not {len(sample)}")
    mean = float(sample.mean())
    error = float(sample.std(ddof=1)) / len(sample) ** 0.5
    half = error * _quantile(0.5 + confidence / 2, df=len(sample) - 1)
    return Interval(mean, mean - half, mean + half)


@functools.cache  # slow, and the same for every point of a curve
def _quantile(probability: float, *, df: int) -> float:
    """Quantile of Student's t distribution."""
    return float(stats.t.ppf(probability, df=df))


def paired_difference(
    before: Sequence[float], after: Sequence[float], *, confidence: float = 0.95
) -> Interval:
    """Student-t interval of the mean of `after - before`, value by value.

    Pairs are the same problems under two models, or the same seeds before and after training.
    Pairing removes the differences between problems.

    Raises:
        ValueError: unequal lengths, or fewer than two pairs.
    """
    if len(before) != len(after):
        raise ValueError(f"pairs need equal lengths, not {len(before)} and {len(after)}")
    return mean_interval(
        np.subtract(after, before, dtype=np.float64).tolist(), confidence=confidence
    )


def has_spread(values: Sequence[float]) -> bool:
    """Whether values differ by more than rounding."""
    return len(values) > 1 and not math.isclose(min(values), max(values), abs_tol=1e-12)


def welch_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of Welch's t-test: equal means, unequal variances, independent values.

    NaN if either side has no spread: its variance is unknown, not zero.
    """
    if not (has_spread(first) and has_spread(second)):
        return math.nan
    return float(stats.ttest_ind(first, second, equal_var=False).pvalue)


def stars(p_value: float) -> str:
    """The paper's marks: * for p < 0.05, ** for p < 0.01, *** for p < 0.001."""
    return "*" * sum(p_value < level for level in (0.05, 0.01, 0.001))
