"""What results mean, by the rules of docs/arena.md: verdicts, best widths, shares by c."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.arena.outcomes import MARGINS, differences
from benchmarks.arena.train import Trained
from gapo_megatron.evaluate.statistics import Interval, mean_interval
from gapo_megatron.objective.diagnostics import SUMS

Results = Mapping[str, Sequence[Trained]]
"""Arms of a question that are trained, by name, chunk by chunk."""
Pair = tuple[str, str]
"""Names of two arms: the first minus the second."""

TOGETHER = 0.95
"""Confidence of all intervals of a table and one outcome together."""
AHEAD, BEHIND, ALIKE, NOT_RESOLVED = "ahead", "behind", "alike", "not resolved"
LITTLE = ", by less than matters"

SCARCE, ABUNDANT = (1, 2), (6, 7)
"""Correct responses of a group, of the two that are compared."""
_CORRECT = 1
SHARES = {
    "clipped": ("clipped_sequences", "sequences"),
    "|s - 1|": ("abs_deviation", "sequences"),
    "gradient mass lost": ("gradient_mass_lost", "gradient_mass"),
}
"""Quantities of correct responses: one sum of `diagnostics` over another."""


def confidence(num_intervals: int) -> float:
    """Of each of some intervals that hold together (Bonferroni)."""
    return 1 - (1 - TOGETHER) / num_intervals


def compare(found: Results, pairs: Sequence[Pair]) -> dict[Pair, dict[str, Interval]]:
    """Differences in points by outcome; pairs that miss an arm are left out, but counted."""
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
    """Of the first of a pair."""
    margin = MARGINS[outcome]
    if interval.low > 0:
        return AHEAD + (LITTLE if interval.high < margin else "")
    if interval.high < 0:
        return BEHIND + (LITTLE if interval.low > -margin else "")
    return ALIKE if -margin < interval.low and interval.high < margin else NOT_RESOLVED


def shares(trained: Sequence[Trained], quantity: str, counts: Sequence[int]) -> list[float]:
    """A quantity of `SHARES` in %, chunk by chunk, in the second half of training.

    Of correct responses of groups with as many right as `counts` has; NaN where there are none.
    """
    above, below = (SUMS.index(name) for name in SHARES[quantity])
    sums = [one.per_c[1][:, _CORRECT, list(counts)].sum(dim=1) for one in trained]
    return [float(100 * of[above] / of[below]) for of in sums]


@dataclass(frozen=True)
class Best:
    """The width with the best mean, and those that its lead on is not resolved."""

    width: float
    not_resolved: list[float]


def best_width(by_width: Mapping[float, Tensor], *, num_rows: int) -> Best:
    """Compare the best of some widths with each other one, paired by seed.

    The intervals hold together for all pairs of widths, since which one is best is only known
    afterwards, and for `num_rows` such comparisons. Values are [seeds], of the same seeds.
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
    """95 % intervals of means of arms that share seeds, without what the seeds' own levels add.

    Each [seeds]. From every seed its mean over the arms is taken (Cousineau), the spread scaled
    by what that removes (Morey): intervals to compare arms by, not those of a level.
    """
    values = torch.stack(list(arms))
    number = len(values)
    scale = (number / (number - 1)) ** 0.5 if number > 1 else 1.0
    centred = values - values.mean(dim=0) + values.mean()
    means = centred.mean(dim=1, keepdim=True)
    spread = means + scale * (centred - means)
    return [mean_interval(row.tolist()) for row in spread]
