"""Outcomes and what they mean, by the rules of docs/arena.md: verdicts, best widths, shares by c.

Outcomes are exact pass rates at the end of training, by seed, in percentage points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.arena.train import PASS_AT, Trained
from gapo_megatron.evaluate.statistics import Interval, mean_interval
from gapo_megatron.objective.diagnostics import SUMS

LATE = 3
"""Number of last evaluations whose mean is a seed's outcome."""
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
    return torch.cat([100 * one.curve[-LATE:].mean(dim=0) for one in trained], dim=1)


def differences(first: Sequence[Trained], second: Sequence[Trained]) -> dict[str, Tensor]:
    """`first` minus `second` by outcome, [seeds] float64 in points; both have the same seeds."""
    by_pass = late(first) - late(second)
    rows = {f"pass@{k}": by_pass[place] for place, k in enumerate(PASS_AT)}
    one, other = (torch.cat([100 * t.curve for t in arm], dim=2) for arm in (first, second))
    rows[EQUAL] = _at_equal_pass_1(one, other)
    return {name: rows[name] for name in OUTCOMES}


def _at_equal_pass_1(first: Tensor, second: Tensor) -> Tensor:
    """Difference of pass@64 at the highest pass@1 that both arms reach, [seeds].

    Curves are [evaluations, len(PASS_AT), seeds]. This compares arms that learn at different speeds
    by the pass@64 they have left at the same pass@1.
    """
    low, high = PASS_AT.index(1), PASS_AT.index(64)
    level = torch.minimum(first[:, low].amax(dim=0), second[:, low].amax(dim=0))
    return _at(first[:, low], first[:, high], level) - _at(second[:, low], second[:, high], level)


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


def compare(found: Results, pairs: Sequence[Pair]) -> dict[Pair, dict[str, Interval]]:
    """Intervals in points by outcome; untrained pairs are left out, but count for Bonferroni."""
    level = confidence(max(len(pairs), 1))
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
    sums = [one.per_c[1][:, _CORRECT, list(counts)].sum(dim=1) for one in trained]
    return [float(100 * of[above] / of[below]) for of in sums]


@dataclass(frozen=True)
class Best:
    """The width with the best mean, and the widths that it is not resolved from."""

    width: float
    not_resolved: list[float]


def best_width(by_width: Mapping[float, Tensor], *, num_rows: int) -> Best:
    """Compare the best width with every other, paired by seed; values are [seeds].

    Intervals are simultaneous over all pairs of widths, because the best is chosen afterwards, and
    over `num_rows` such comparisons.
    """
    best = max(by_width, key=lambda width: float(by_width[width].mean()))
    number = len(by_width)
    level = confidence(num_rows * max(number * (number - 1) // 2, 1))
    leads = {
        width: mean_interval((by_width[best] - values).tolist(), confidence=level)
        for width, values in by_width.items()
        if width != best
    }
    return Best(best, [width for width, lead in leads.items() if lead.low <= 0])


def within_seeds(arms: Sequence[Tensor]) -> list[Interval]:
    """95 % intervals of the means of arms (each [seeds]), without the differences between seeds.

    Each seed's mean over the arms is subtracted (Cousineau), and the spread is scaled up for that
    (Morey). Use them to compare arms, not as intervals of the level.
    """
    values = torch.stack(list(arms))
    number = len(values)
    scale = (number / (number - 1)) ** 0.5 if number > 1 else 1.0
    centred = values - values.mean(dim=0) + values.mean()
    means = centred.mean(dim=1, keepdim=True)
    spread = means + scale * (centred - means)
    return [mean_interval(row.tolist()) for row in spread]
