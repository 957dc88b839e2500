"""The figure of branches: what another objective did to a run from the branch point on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from gapo_megatron.evaluate.statistics import has_spread, paired_difference
from gapo_megatron.objective.diagnostics import advantage_correlation
from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.clipping import CLIPPED, DEVIATION
from gapo_megatron.ops.report.exhibit import Exhibit
from gapo_megatron.ops.report.runs import Run, Values
from gapo_megatron.ops.report.series import (
    MAX_WINDOW,
    NoData,
    Row,
    pass_keys,
    per_c,
    window_of,
    windowed,
)
from gapo_megatron.ops.report.style import (
    arm_style,
    column,
    legend_below,
    outer_names,
    over_steps,
    panels,
    thinned,
)

Since = Callable[[Run, int], Values]
"""Values of a run from a branch point on."""
ADVANTAGE = "advantage"
MANY = 30
"""Points of a line that are not marked one by one."""


def intervention(comparison: Comparison) -> Exhibit:
    """Every branch and the runs it left, from the branch point on; differences paired by seed."""
    pairs = [(arm, parent) for arm in comparison.arms if (parent := comparison.parent(arm))]
    if not pairs:
        raise NoData("no run is a branch of another one (checkpoint.branch_from)")
    rows: list[Row] = []
    for branch, parent in pairs:
        for quantity, values in _quantities(branch, parent).items():
            rows += _rows(branch, parent, quantity, values)
    if not rows:
        raise NoData("no branch and the run it left have values at the same step")
    quantities = list(dict.fromkeys(str(row["quantity"]) for row in rows))
    lines = list(dict.fromkeys(one.label for branch, parent in pairs for one in (parent, branch)))
    figure, axes = panels(len(quantities), share_y=False)
    for axis, quantity in zip(axes, quantities, strict=True):
        _draw(axis, [row for row in rows if row["quantity"] == quantity], lines)
    outer_names(axes, share_y=False)
    legend_below(figure, axes[0])
    return Exhibit(
        aid="A branch and the runs it left, from the branch point on. Both continue from the same "
        "weights, with the same data; they differ in the settings that the branch changed.",
        rows=rows,
        figure=figure,
        notes=[
            "Clipped (share of the correct rollouts) and Pearson r (over c, of mean deviation and "
            f"mean advantage) are over the steps since the branch point, at most {MAX_WINDOW}. "
            "Correct in training is a mean over a tenth of the run. The bar at the end of a curve "
            "is the 95 % Student-t interval of the difference, over pairs of runs with one seed.",
            *(_at_the_end(branch, rows) for branch, _ in pairs),
        ],
    )


def _quantities(branch: Arm, parent: Arm) -> dict[str, Since]:
    try:
        keys = pass_keys([branch, parent])
    except NoData:
        keys = []
    found: dict[str, Since] = {
        f"{key.removeprefix('eval/')} (%)": partial(_evaluated, key=key) for key in keys
    }
    half = branch.k // 2
    found[f"clipped, c ≤ {half} (%)"] = partial(_clipped, low=1, high=half)
    found[f"clipped, c > {half} (%)"] = partial(_clipped, low=half + 1, high=branch.k - 1)
    return found | {"correct in training (%)": _reward, "Pearson r": correlation_since}


def _evaluated(run: Run, begin: int, *, key: str) -> Values:
    return {step: value for step, value in run.series(key).items() if step >= begin}


def _reward(run: Run, begin: int) -> Values:
    values = {step: run.series("reward/mean")[step] for step in _trained(run, begin)}
    return windowed(values, list(values), window_of([run]), bin_steps=run.bin_steps)


def _trained(run: Run, begin: int) -> list[int]:
    """The steps from `begin` on, without a bin that holds earlier ones too."""
    return [step for step in run.series("reward/mean") if step - run.bin_steps + 1 >= begin]


def _rows(branch: Arm, parent: Arm, quantity: str, values: Since) -> list[Row]:
    """Both lines, and at the same steps the difference; none where seeds share no step."""
    assert branch.runs[0].branch is not None
    begin = int(branch.runs[0].branch["step"])
    by_seed = {run.seed: run for run in parent.runs}
    left = [by_seed[run.seed] for run in branch.runs]
    by_arm = [[values(run, begin) for run in runs] for runs in (left, branch.runs)]
    common = set.intersection(*(set(one) for runs in by_arm for one in runs))
    rows: list[Row] = []
    for step in sorted(common):
        theirs, ours = ([one[step] for one in runs] for runs in by_arm)
        difference = np.subtract(ours, theirs).tolist()
        low = high = math.nan
        if has_spread(difference):
            found = paired_difference(theirs, ours)
            low, high = found.low, found.high
        row: Row = {
            "branch": branch.label,
            "parent": parent.label,
            "quantity": quantity,
            "step": step,
            "parent mean": float(np.mean(theirs)),
            "branch mean": float(np.mean(ours)),
            "difference": float(np.mean(difference)),
            "low": None if math.isnan(low) else low,
            "high": None if math.isnan(high) else high,
            "seeds": len(ours),
        }
        rows.append(row)
    return rows


def _clipped(run: Run, begin: int, *, low: int, high: int) -> Values:
    """Clip fraction of correct rollouts with low <= c <= high."""
    steps, sums = _sums(run, CLIPPED, begin)
    within = [pair for c, pair in sums.items() if low <= c <= high]
    if not within:
        return {}
    weights, values = np.sum(within, axis=0)
    return {step: values[i] / weights[i] for i, step in enumerate(steps) if weights[i] > 0}


def correlation_since(run: Run, begin: int) -> Values:
    """Pearson over c of mean deviation and mean advantage of correct rollouts from step `begin` on.

    As in training, nothing below three values of c, or where either is the same for all.
    """
    steps, deviations = _sums(run, DEVIATION, begin)
    _, advantages = _sums(run, ADVANTAGE, begin)
    both = [c for c in deviations if c in advantages]
    found = {}
    for i, step in enumerate(steps):
        sums = [(*deviations[c][:, i], advantages[c][1, i]) for c in both]
        r = advantage_correlation(*np.array(sums).reshape(-1, 3).T)
        if r is not None:
            found[step] = r
    return found


def _sums(run: Run, name: str, begin: int) -> tuple[list[int], dict[int, np.ndarray]]:
    """Over the last `MAX_WINDOW` steps from `begin` on, every rollout counting the same.

    Returns:
        Steps, without the first ones (`window_of`), which rest on few rollouts; by c, [2, steps]:
        number of correct rollouts, sum of `per_c/correct/{name}` over them.
    """
    steps = np.array(_trained(run, begin), dtype=np.int64)
    first = np.searchsorted(steps, steps - MAX_WINDOW, side="right")
    shown = steps >= begin + window_of([run]) - 1
    found = {}
    for c, (values, weights) in per_c(run, name).items():
        weight = np.array([weights[step] if step in values else 0.0 for step in steps])
        value = np.array([values.get(step, 0.0) for step in steps])
        sums = np.cumsum(np.pad([weight, weight * value], ((0, 0), (1, 0))), axis=1)
        found[c] = (sums[:, 1:] - sums[:, first])[:, shown]
    return steps[shown].tolist(), found


def _draw(axis: Axes, rows: Sequence[Row], lines: Sequence[str]) -> None:
    scale = _scale(rows[0])
    over_steps(axis, {str(row[side]) for row in rows for side in ("parent", "branch")})
    axis.set_ylabel(str(rows[0]["quantity"]))
    drawn = set()
    for branch in dict.fromkeys(str(row["branch"]) for row in rows):
        chosen = [row for row in rows if row["branch"] == branch]
        for side, label in (("parent", str(chosen[0]["parent"])), ("branch", branch)):
            if label in drawn:
                continue  # of several branches the same run
            drawn.add(label)
            shown, look = thinned(chosen), arm_style(lines.index(label))
            look["marker"] = look["marker"] if len(shown) < MANY else ""
            means = scale * column(shown, f"{side} mean")
            axis.plot(column(shown, "step"), means, label=label, **look)
        last = chosen[-1]
        if last["low"] is not None:
            mean, half = scale * float(last["branch mean"] or 0), _half(last)
            least, most = (0, 100) if scale == 100 else (-1, 1)
            axis.errorbar(
                [float(last["step"] or 0)],
                [mean],
                yerr=[[mean - max(mean - half, least)], [min(mean + half, most) - mean]],
                color=arm_style(lines.index(branch))["color"],
                capsize=2.5,
                elinewidth=0.8,
                label="_",
            )


def _half(row: Row) -> float:
    """Half the width of an interval, as drawn."""
    return _scale(row) * (float(row["high"] or 0) - float(row["low"] or 0)) / 2


def _scale(row: Row) -> float:
    return 100 if "%" in str(row["quantity"]) else 1


def _at_the_end(branch: Arm, rows: Sequence[Row]) -> str:
    """The last differences, in words."""
    chosen = {str(row["quantity"]): row for row in rows if row["branch"] == branch.label}
    parts = []
    for quantity, row in chosen.items():
        scale = _scale(row)
        text = f"{scale * float(row['difference'] or 0):+.2f}"
        if row["low"] is not None:
            text += f" [{scale * float(row['low']):+.2f}, {scale * float(row['high'] or 0):+.2f}]"
        parts.append(f"{quantity.removesuffix(' (%)')} {text} at {row['step']}")
    parent = next(iter(chosen.values()))["parent"] if chosen else ""
    return f"{branch.label} minus {parent} (shares in points): {'; '.join(parts)}."
