"""Correlation of ratio and advantage with intervals, early and late; and the dose beside it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapo_megatron.objective.diagnostics import WINDOW, advantage_correlation
from gapo_tools.evaluation.table import NONE, Table, mean
from gapo_tools.reporting.arms import Arm, Comparison
from gapo_tools.reporting.runs import Run
from gapo_tools.reporting.series import NoData, Row
from gapo_tools.reporting.style import Exhibit

DEVIATION, DRIFT = "ratio_deviation", "ratio_abs_deviation"
LOST = "clip/positive_gradient_mass_lost"
DOSES = {
    "decisions": "clip/dose_decisions",
    "gradient": "clip/dose_gradient",
}
_PREFIX = "per_c/correct/"
RESAMPLES = 1000
CENTRAL = (2.5, 97.5)
"""Percentiles of the 95 % interval."""


@dataclass(frozen=True)
class Steps:
    """What a correlation over c is computed from: sums over correct rollouts, by step and c."""

    steps: np.ndarray
    """[steps] int64."""
    sums: np.ndarray
    """[steps, 3, C] float64: number of rollouts, sum of a deviation, sum of A."""

    @classmethod
    def of(cls, runs: Sequence[Run], name: str) -> list[Steps]:
        """Those of each run, of `per_c/correct/{name}`; without steps if it has no such metric.

        All have a column for each c of any of the runs.
        """
        keys = {key for run in runs for key in run.keys(rf"{_PREFIX}{name}/c\d+")}
        cs = sorted(int(key.rpartition("/c")[2]) for key in keys)
        return [cls._of_run(run, name, cs) for run in runs]

    @classmethod
    def _of_run(cls, run: Run, name: str, cs: Sequence[int]) -> Steps:
        columns = [
            [run.series(f"{_PREFIX}{part}/c{c}") for c in cs]
            for part in ("sequences", name, "advantage")
        ]
        steps = sorted({step for one in columns[0] for step in one})
        values = np.array(
            [[[one.get(step, 0.0) for one in part] for part in columns] for step in steps]
        ).reshape(len(steps), 3, len(cs))
        values[:, 1:] *= values[:, :1]
        return cls(np.array(steps, dtype=np.int64), values)

    def between(self, first: int, end: int) -> np.ndarray:
        """Sums of steps `first` to `end` - 1."""
        return self.sums[(self.steps >= first) & (self.steps < end)]


def bootstrap(parts: Sequence[np.ndarray]) -> tuple[float | None, float | None, float | None]:
    """Pearson's r over c of the pooled means, and its 95 % bootstrap interval over steps.

    Args:
        parts: sums of each run, `Steps.between`. The steps of a run are drawn again with
            replacement, `RESAMPLES` times, always with the same random numbers.

    Returns:
        r, low, high; all None where r is undefined, the bounds where only few steps define it.
    """
    r = advantage_correlation(*sum(part.sum(axis=0) for part in parts)) if len(parts) else None
    if r is None or max(map(len, parts)) < 2:
        return r, None, None
    drawn = sum(np.tensordot(_draws(len(part)), part, axes=1) for part in parts if len(part))
    assert isinstance(drawn, np.ndarray)
    found = pearson(drawn)
    if np.isnan(found).mean() > 0.05:
        return r, None, None
    low, high = np.nanpercentile(found, CENTRAL)
    return r, float(low), float(high)


@functools.cache
def _draws(size: int) -> np.ndarray:
    """How often each of `size` steps is drawn, [RESAMPLES, size] float64; the same on each call."""
    generator = np.random.default_rng(size)
    return generator.multinomial(size, np.full(size, 1 / size), size=RESAMPLES).astype(np.float64)


def pearson(sums: np.ndarray) -> np.ndarray:
    """`advantage_correlation` of many sums [N, 3, C], [N] float64; NaN where it has none."""
    number, *totals = np.moveaxis(sums, 1, 0)
    present = number > 0
    count = present.sum(axis=1)
    centred = []
    for total in totals:
        means = np.where(present, total / np.where(present, number, 1), 0)
        level = means.sum(axis=1) / np.maximum(count, 1)
        centred.append(np.where(present, means - level[:, None], 0))
    one, other = centred
    scale = np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1))
    defined = (count >= 3) & (scale > 0)
    return np.where(defined, (one * other).sum(axis=1) / np.where(defined, scale, 1), np.nan)


def window_bounds(run: Run, steps: Sequence[int]) -> dict[int, tuple[float | None, float | None]]:
    """Bootstrap interval of `ratio/advantage_correlation_window` at each of `steps`."""
    (of_run,) = Steps.of([run], DEVIATION)
    return {
        step: bootstrap([of_run.between(step - WINDOW + 1, step + 1)])[1:]
        for step in steps
        if len(of_run.steps)
    }


def correlation(comparison: Comparison) -> Exhibit:
    """Correlations of s - 1 and |s - 1| by half of training, gradient lost, and the dose."""
    rows = [row for arm in comparison.arms for row in _rows(arm)]
    if not rows:
        raise NoData(f"no run has per_c/correct/{DEVIATION} at three values of c")
    known = [key for key in ("lost", *DOSES) if any(row[key] is not None for row in rows)]
    names = {"lost": "gradient lost (%)"} | {key: f"dose: {key} (%)" for key in DOSES}
    columns = ["method", "steps", "r of s - 1 [95 %]", "r of abs(s - 1) [95 %]"]
    lines = [
        [
            row["method"],
            f"{row['first']} to {row['last']}",
            _with_bounds(row, DEVIATION),
            _with_bounds(row, DRIFT),
            *(_percent(row[key]) for key in known),
        ]
        for row in rows
    ]
    notes = [
        "r: Pearson's correlation over c of means over the correct rollouts of these steps and of "
        f"all seeds; the interval is a bootstrap over steps ({RESAMPLES} draws).",
    ]
    if "lost" in known:
        notes.append(
            "gradient lost: share of the correct rollouts' gradient that the clip removes."
        )
    if any(key in DOSES for key in known):
        notes.append(
            "dose: share of the clip's decisions on correct rollouts, and of their gradient, that "
            "a fixed clip at eps_high_max makes otherwise on the same ratios. Where it is near 0, "
            "the method differs from the fixed clip in name only."
        )
    return Exhibit(
        aid="Whether ratios of correct rollouts follow their advantages, early and late; and what "
        "the clip removes.",
        rows=rows,
        table=Table(
            "ratio, advantage and clip by half of training",
            [*columns, *(names[key] for key in known)],
            lines,
            notes=notes,
        ),
    )


def _rows(arm: Arm) -> list[Row]:
    """A row for each half of training that all seeds have; without r in either, none."""
    num_steps = min(run.num_steps for run in arm.runs)
    of_runs = {name: Steps.of(arm.runs, name) for name in (DEVIATION, DRIFT)}
    rows: list[Row] = []
    for first, end in ((0, num_steps // 2), (num_steps // 2, num_steps)):
        row: Row = {"method": arm.label, "first": first, "last": end - 1}
        for name, runs in of_runs.items():
            found = bootstrap([one.between(first, end) for one in runs if len(one.steps)])
            row |= zip((name, f"{name} low", f"{name} high"), found, strict=True)
        row["lost"] = _mean(arm, LOST, first, end)
        row |= {key: _mean(arm, metric, first, end) for key, metric in DOSES.items()}
        rows.append(row)
    return rows if any(row[DEVIATION] is not None for row in rows) else []


def _mean(arm: Arm, metric: str, first: int, end: int) -> float | None:
    """Mean over steps and seeds; None without any."""
    values = [
        value
        for run in arm.runs
        for step, value in run.series(metric).items()
        if first <= step < end
    ]
    return mean(values) if values else None


def _with_bounds(row: Row, name: str) -> str:
    r, low, high = (row[key] for key in (name, f"{name} low", f"{name} high"))
    if r is None:
        return NONE
    return f"{r:+.2f}" if low is None else f"{r:+.2f} [{low:+.2f}, {high:+.2f}]"


def _percent(value: float | None) -> str:
    return NONE if value is None or math.isnan(value) else f"{100 * value:.2f}"
