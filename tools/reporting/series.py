"""From runs to curves: means over a window of steps, over seeds, and their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gapo_tools.evaluation.statistics import mean_interval
from gapo_tools.reporting.arms import Arm
from gapo_tools.reporting.runs import Run, Values

WINDOW_SHARE = 0.1
"""Window of a smoothed curve, as a share of the longest run's steps."""
MAX_WINDOW = 200
"""Longest window: the paper's, reached by runs of 2000 steps."""

Row = dict[str, Any]
"""One data point of a figure, as in its CSV: text, numbers, None for no value."""


class NoData(Exception):
    """Raised for a figure that these runs cannot fill; the message says why."""


def select(rows: Sequence[Row], **wanted: str | int) -> list[Row]:
    """Rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def distinct(rows: Sequence[Row], key: str) -> list[str]:
    """Values of one key, each once, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def window_of(runs: Sequence[Run]) -> int:
    """Steps in a smoothing window, the same for all runs."""
    return max(1, min(MAX_WINDOW, round(max(run.num_steps for run in runs) * WINDOW_SHARE)))


def windowed(
    values: Values, steps: Sequence[int], window: int, *, weights: Values | None = None
) -> Values:
    """Mean over the last `window` steps, for each of `steps` with a full window behind it.

    Args:
        values: values by step; steps without a value are left out of the mean.
        steps: the run's steps, ascending. (A mean over fewer steps would scatter at the start.)
        window: number of steps, not of values.
        weights: weights of the values; None: equal. No mean where they add up to 0.
    """
    known = np.array(list(values), dtype=np.int64)
    weight = np.array([1.0 if weights is None else weights[step] for step in values])
    sums = np.concatenate([[0.0], np.cumsum(weight * np.array(list(values.values())))])
    totals = np.concatenate([[0.0], np.cumsum(weight)])
    last = np.searchsorted(known, steps, side="right")
    first = np.searchsorted(known, np.asarray(steps) - window, side="right")
    return {
        step: float((sums[end] - sums[start]) / (totals[end] - totals[start]))
        for step, start, end in zip(steps, first, last, strict=True)
        if step - steps[0] >= window - 1 and totals[end] > totals[start]
    }


def interval(values: Sequence[float]) -> Row:
    """Columns mean, low, high, seeds of one value per seed; no bounds for a single seed."""
    if len(values) == 1:
        return {"mean": values[0], "low": None, "high": None, "seeds": 1}
    found = mean_interval(values)
    return {"mean": found.mean, "low": found.low, "high": found.high, "seeds": len(values)}


def curve_rows(
    arms: Sequence[Arm], values: Callable[[Run], Values], **more: str | int
) -> list[Row]:
    """Mean over an arm's seeds with its 95 % Student-t interval, at the steps all seeds have.

    Args:
        arms: arms of the figure.
        values: returns the values of one run.
        more: further columns of every row.

    Returns:
        Rows of arm, `more`, step, mean, low, high, seeds; low and high None for a single seed.
    """
    rows: list[Row] = []
    for arm in arms:
        by_run = [values(run) for run in arm.runs]
        for step in sorted(set.intersection(*map(set, by_run))):
            row: Row = {"arm": arm.label, **more, "step": step}
            rows.append(row | interval([one[step] for one in by_run]))
    return rows


def rollout_weights(run: Run, name: str, c: int) -> Values:
    """Weights of `per_c/{name}/c{c}`, of correct rollouts: their number; for `*_tokens`, tokens.

    Numbers of tokens are numbers of rollouts times their mean length. They are exact but for groups
    with an unknown verdict whose other rollouts are all correct: these count in the mean length.
    """
    sequences = run.series(f"per_c/correct/sequences/c{c}")
    if not name.endswith("_tokens"):
        return sequences
    lengths = run.series(f"per_c/correct/response_length/c{c}")
    return {step: number * lengths[step] for step, number in sequences.items() if step in lengths}


def per_c(run: Run, name: str) -> dict[int, tuple[Values, Values]]:
    """Values of `per_c/{name}` by c, and their `rollout_weights` (1 for metrics of groups)."""
    prefix = f"per_c/{name}/c"
    found = {}
    for key in run.keys(prefix + r"\d+"):
        c, values = int(key.removeprefix(prefix)), run.series(key)
        is_of_rollouts = name.startswith("correct/")
        weights = rollout_weights(run, name, c) if is_of_rollouts else dict.fromkeys(values, 1.0)
        if not values.keys() <= weights.keys():
            raise NoData(f"{run.folder.name} has no per_c/correct/sequences or response_length")
        found[c] = (values, weights)
    return found


def final(arm: Arm, key: str) -> tuple[int, list[float]] | None:
    """Last step at which all runs of an arm have `key`, and their values there, in seed order."""
    by_run = [run.series(key) for run in arm.runs]
    common = set(by_run[0]).intersection(*by_run[1:])
    if not common:
        return None
    return max(common), [values[max(common)] for values in by_run]


def pass_keys(arms: Sequence[Arm]) -> list[str]:
    """`eval/pass@1`, and pass@k for the largest k that all runs with evaluations have.

    Empty without evaluations, or if they have no k in common.
    """
    by_run = [set(run.keys(r"eval/pass@\d+")) for arm in arms for run in arm.runs]
    common = set.intersection(*filter(None, by_run)) if any(by_run) else set()
    ordered = sorted(common, key=lambda key: int(key.rpartition("@")[2]))
    return list(dict.fromkeys([*ordered[:1], *ordered[-1:]]))
