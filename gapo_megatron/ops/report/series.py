"""From runs to curves: means over a window of steps, over seeds, and their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gapo_megatron.evaluate.statistics import mean_interval
from gapo_megatron.ops.report.arms import Arm
from gapo_megatron.ops.report.runs import Run, Values

WINDOW_SHARE = 0.1
"""Curves of single steps' values are means over this share of the longest run."""
MAX_WINDOW = 200
"""The paper's window, reached by runs of 2000 steps."""

Row = dict[str, str | int | float | None]
"""One point of a figure, as its CSV has it; None: there is none."""
SEED = "seed "
"""Prefix of the columns with one seed's values."""


class NoData(Exception):
    """A figure that these runs cannot fill; says why, in a few words."""


def window_of(runs: Sequence[Run]) -> int:
    """Steps that one point of a smoothed curve is the mean of; the same for all runs.

    Whole bins, where one of them comes from an archive.
    """
    window = max(1, min(MAX_WINDOW, round(max(run.num_steps for run in runs) * WINDOW_SHARE)))
    bin_steps = max(run.bin_steps for run in runs)
    return -(-window // bin_steps) * bin_steps


def window_text(window: int) -> str:
    """What a point of a smoothed curve shows, in words."""
    return "one step" if window == 1 else f"the mean of {window} steps, its own and those before it"


def windowed(
    values: Values,
    steps: Sequence[int],
    window: int,
    *,
    weights: Values | None = None,
    bin_steps: int = 1,
) -> Values:
    """Mean over the last `window` steps, up to each of `steps` that has as many behind it.

    Args:
        values: steps without one count for nothing.
        steps: ascending; the first is the run's. Means of fewer would spread far at the beginning.
        window: steps, not values.
        weights: weights of the values; equal without. A window of no weight has no mean.
        bin_steps: steps per value (`Run.bin_steps`). A last bin that is not full, of a run
            that was cut off, gets no point: windows end where bins do.
    """
    begin = steps[0] - bin_steps + 1 if steps else 0
    known = np.array(list(values), dtype=np.int64)
    weight = np.array([1.0 if weights is None else weights[step] for step in values])
    sums = np.concatenate([[0.0], np.cumsum(weight * np.array(list(values.values())))])
    totals = np.concatenate([[0.0], np.cumsum(weight)])
    last = np.searchsorted(known, steps, side="right")
    first = np.searchsorted(known, np.asarray(steps) - window, side="right")
    return {
        step: float((sums[end] - sums[start]) / (totals[end] - totals[start]))
        for step, start, end in zip(steps, first, last, strict=True)
        if step - begin >= window - 1
        and (step + 1) % bin_steps == 0
        and totals[end] > totals[start]
    }


def over_seeds(by_run: Sequence[Values]) -> list[Row]:
    """Mean over runs with its 95 % Student-t interval, at the steps that all of them have.

    Returns:
        Rows of step, mean, low, high, seeds; the bounds None for a single run.
    """
    common = set(by_run[0]).intersection(*by_run[1:])
    return [
        {"step": step, **interval([values[step] for values in by_run])} for step in sorted(common)
    ]


def interval(values: Sequence[float]) -> Row:
    """Mean, low, high, seeds of one value per seed; the bounds None for a single one."""
    if len(values) == 1:
        return {"mean": values[0], "low": None, "high": None, "seeds": 1}
    found = mean_interval(values)
    return {"mean": found.mean, "low": found.low, "high": found.high, "seeds": len(values)}


def curves(
    arms: Sequence[Arm], values: Callable[[Run], Values], *, what: str, **more: str | int
) -> list[Row]:
    """`curve_rows`, of which there must be some.

    Raises:
        NoData: there are none; names `what`.
    """
    rows = curve_rows(arms, values, **more)
    if not rows:
        raise NoData(f"no run has {what}")
    return rows


def curve_rows(
    arms: Sequence[Arm], values: Callable[[Run], Values], **more: str | int
) -> list[Row]:
    """`over_seeds` of every arm whose runs all have values.

    Args:
        arms: arms of the figure.
        values: gives the values of one run.
        more: further columns of every row.
    """
    rows: list[Row] = []
    for arm in arms:
        found = over_seeds([values(run) for run in arm.runs])
        rows += [{"arm": arm.label, **more, **row} for row in found]
    return rows


def per_c(run: Run, name: str, *, side: str = "correct") -> dict[int, tuple[Values, Values]]:
    """Values and weights of `per_c/{side}/{name}` by c; a weight is a number of rollouts."""
    prefix = f"per_c/{side}/{name}/c"
    found = {}
    for key in run.keys(prefix + r"\d+"):
        c = int(key.removeprefix(prefix))
        values, weights = run.series(key), run.series(f"per_c/{side}/sequences/c{c}")
        if not values.keys() <= weights.keys():
            raise NoData(f"{run.folder.name} has no per_c/{side}/sequences: an older version's run")
        found[c] = (values, weights)
    return found


def last_half(run: Run, name: str, *, num_steps: int) -> dict[int, float]:
    """Mean by c over the last half of `num_steps` steps; every correct rollout counts the same.

    Args:
        run: has trained so many steps or more.
        name: name of the metric per c.
        num_steps: steps that all runs to be compared have.
    """
    found = {}
    for c, (values, weights) in per_c(run, name).items():
        late = [step for step in values if num_steps - num_steps // 2 <= step < num_steps]
        total = sum(weights[step] for step in late)
        if total > 0:
            found[c] = sum(weights[step] * values[step] for step in late) / total
    return found


def final(arm: Arm, key: str) -> tuple[int, list[float]] | None:
    """The last step at which all runs of an arm have `key`, and each one's value there, by seed."""
    by_run = [run.series(key) for run in arm.runs]
    common = set(by_run[0]).intersection(*by_run[1:])
    if not common:
        return None
    return max(common), [values[max(common)] for values in by_run]


def pass_keys(arms: Sequence[Arm]) -> list[str]:
    """`eval/pass@1` and, of the larger k, the largest that all runs with evaluations have.

    Raises:
        NoData: there is none.
    """
    by_run = [set(run.keys(r"eval/pass@\d+")) for arm in arms for run in arm.runs]
    common = set.intersection(*filter(None, by_run)) if any(by_run) else set()
    if not common:
        raise NoData("no run has evaluated, or none with the same number of samples")
    ordered = sorted(common, key=lambda key: int(key.rpartition("@")[2]))
    return list(dict.fromkeys([ordered[0], ordered[-1]]))
