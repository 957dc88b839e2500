"""Outcomes and what they mean, by the rules of README.md: verdicts, best widths, shares by c.

Outcomes are exact pass rates at the end of training, by seed, in percentage points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gapo_megatron.objective.diagnostics import SUMS
from gapo_tools.evaluation.statistics import Interval, mean_interval
from studies.arena.train import LATE, PASS_AT, QUARTERS, Trained

EQUAL = "pass@64 at equal pass@1"
OUTCOMES = ("pass@1", "pass@64", EQUAL)
MARGINS = {"pass@1": 0.2, "pass@64": 0.5, EQUAL: 0.5}
"""Differences below these, in points, do not matter in practice."""

Results = Mapping[str, Sequence[Trained]]
"""A question's trained arms: name -> results by chunk of seeds."""
Pair = tuple[str, str]
"""Names of two arms: the first minus the second."""

TOGETHER = 0.95
"""Simultaneous confidence of a table's intervals for one outcome."""
AHEAD, BEHIND, ALIKE, NOT_RESOLVED = "ahead", "behind", "alike", "not resolved"
LITTLE = ", by less than matters"

SCARCE, ABUNDANT = (1, 2), (6, 7)
"""Values of c that are compared."""
_CORRECT = 1
SHARES = {
    "clipped": ("clipped_sequences", "sequences"),
    "|s - 1|": ("abs_deviation", "sequences"),
    "gradient mass lost": ("gradient_mass_lost", "gradient_mass"),
}
"""Quantity of correct responses -> numerator and denominator among the sums of `diagnostics`."""


def late(trained: Sequence[Trained]) -> Tensor:
    """Outcomes of all seeds, [len(PASS_AT), seeds] float64, in %."""
    curves = [one.curve[-LATE:, : len(PASS_AT)] for one in trained]
    return torch.cat([100 * curve.mean(dim=0) for curve in curves], dim=1)


def differences(first: Sequence[Trained], second: Sequence[Trained]) -> dict[str, Tensor]:
    """`first` minus `second` by outcome, [seeds] float64 in points; both have the same seeds."""
    by_pass = late(first) - late(second)
    rows = {f"pass@{k}": by_pass[place] for place, k in enumerate(PASS_AT)}
    low, high = PASS_AT.index(1), PASS_AT.index(64)
    rows[EQUAL] = 100 * at_equal(_curves(first), _curves(second), equal=low, wanted=high)
    return {name: rows[name] for name in OUTCOMES}


def pass_at_equal_divergence(first: Sequence[Trained], second: Sequence[Trained]) -> Tensor:
    """Difference of pass@1 at the largest KL from the first policy that both reach, [seeds]."""
    one, other = _curves(first), _curves(second)
    return 100 * at_equal(one, other, equal=len(PASS_AT), wanted=PASS_AT.index(1))


def _curves(arm: Sequence[Trained]) -> Tensor:
    return torch.cat([one.curve for one in arm], dim=2)


def at_equal(first: Tensor, second: Tensor, *, equal: int, wanted: int) -> Tensor:
    """Difference of the row `wanted` where the row `equal` is the highest that both reach, [seeds].

    Curves are [evaluations, rows, seeds]. This compares arms that learn at different speeds.
    """
    level = torch.minimum(first[:, equal].amax(dim=0), second[:, equal].amax(dim=0))
    ends = [_at(curve[:, equal], curve[:, wanted], level) for curve in (first, second)]
    return ends[0] - ends[1]


def _at(rising: Tensor, wanted: Tensor, level: Tensor) -> Tensor:
    """`wanted` where `rising` [evaluations, seeds] first reaches `level` [seeds], interpolated."""
    reached = (rising >= level).double().argmax(dim=0, keepdim=True)
    before = (reached - 1).clamp(min=0)
    low, high = rising.gather(0, before)[0], rising.gather(0, reached)[0]
    share = torch.where(high > low, (level - low) / (high - low).clamp(min=1e-12), 1)
    left, right = wanted.gather(0, before)[0], wanted.gather(0, reached)[0]
    return left + share * (right - left)


def confidence(num_intervals: int) -> float:
    """Confidence of each of `num_intervals` simultaneous intervals (Bonferroni)."""
    return 1 - (1 - TOGETHER) / num_intervals


def compare(
    found: Results, pairs: Sequence[Pair], *, more_rows: int = 0
) -> dict[Pair, dict[str, Interval]]:
    """Intervals in points by outcome; untrained pairs are left out, but count for Bonferroni.

    So do `more_rows` of another table.
    """
    level = confidence(max(len(pairs) + more_rows, 1))
    return {
        (first, second): {
            outcome: mean_interval(values.tolist(), confidence=level)
            for outcome, values in differences(found[first], found[second]).items()
        }
        for first, second in pairs
        if first in found and second in found
    }


def verdict(interval: Interval, outcome: str) -> str:
    """Verdict on the first arm of a pair, from the interval of first minus second."""
    margin = MARGINS[outcome]
    if interval.low > 0:
        return AHEAD + (LITTLE if interval.high < margin else "")
    if interval.high < 0:
        return BEHIND + (LITTLE if interval.low > -margin else "")
    return ALIKE if -margin < interval.low and interval.high < margin else NOT_RESOLVED


def shares(trained: Sequence[Trained], quantity: str, counts: Sequence[int]) -> list[float]:
    """A quantity of `SHARES` in % by chunk, in the second half of training.

    Over correct responses of groups whose c is in `counts`; NaN if there are none.
    """
    above, below = (SUMS.index(name) for name in SHARES[quantity])
    halves = [one.per_c[QUARTERS // 2 :].sum(dim=0) for one in trained]
    sums = [half[:, _CORRECT, list(counts)].sum(dim=1) for half in halves]
    return [float(100 * of[above] / of[below]) for of in sums]
