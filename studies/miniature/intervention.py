"""The paper's intervention: a branch with another objective beside the runs that it left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gapo_megatron.objective.diagnostics import advantage_correlation
from gapo_tools.evaluation.statistics import has_spread, paired_difference
from gapo_tools.reporting.arms import Arm, Comparison
from gapo_tools.reporting.figures import DEVIATION
from gapo_tools.reporting.runs import Values
from gapo_tools.reporting.series import (
    MAX_WINDOW,
    NoData,
    Row,
    distinct,
    pass_keys,
    per_c,
    select,
    window_of,
    windowed,
)
from gapo_tools.reporting.style import (
    Exhibit,
    arm_style,
    column,
    legend_below,
    outer_names,
    over_steps,
    panels,
)
from studies.archive import StudyRun

CLIPPED = "correct/clip_fraction_sequences"
MOST_MARKED = 30
"""A line with this many points or more has no markers."""


def intervention(comparison: Comparison) -> Exhibit:
    """Every branch and the runs it left, from the branch point on; differences paired by seed."""
    pairs = [(arm, parent) for arm in comparison.arms if (parent := find_parent(arm, comparison))]
    if not pairs:
        raise NoData("no run is a branch of another one (checkpoint.branch_from)")
    rows: list[Row] = []
    for branch, parent in pairs:
        for quantity, values in _quantities(branch, parent).items():
            rows += _rows(branch, parent, quantity, values)
    if not rows:
        raise NoData("no branch and the run it left have values at the same step")
    quantities = distinct(rows, "quantity")
    lines = list(dict.fromkeys(one.label for branch, parent in pairs for one in (parent, branch)))
    figure, axes = panels(len(quantities), share_y=False)
    for axis, quantity in zip(axes, quantities, strict=True):
        _draw(axis, select(rows, quantity=quantity), lines)
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
            "is the 95 % Student-t interval of the difference, paired by seed.",
            *(_at_the_end(branch, rows) for branch, _ in pairs),
        ],
    )


def find_parent(branch: Arm, comparison: Comparison) -> Arm | None:
    """The arm whose runs a branch left, by the names of their folders; None: no branch."""
    left = {(run.seed, Path(run.branch["run"]).name) for run in branch.runs if run.branch}
    for arm in comparison.arms:
        names = {(run.seed, run.folder.name) for run in arm.runs if run.branch is None}
        if left and left <= names:
            return arm
    return None


def _quantities(branch: Arm, parent: Arm) -> dict[str, Callable[[StudyRun, int], Values]]:
    """Name of a panel -> values of a run from the branch point on."""
    keys = pass_keys([branch, parent])

    def evaluated(run: StudyRun, begin: int, *, key: str) -> Values:
        return {step: value for step, value in run.series(key).items() if step >= begin}

    def reward(run: StudyRun, begin: int) -> Values:
        values = {step: run.series("reward/mean")[step] for step in _trained(run, begin)}
        return windowed(values, list(values), window_of([run]))

    half = branch.k // 2
    return {
        **{f"{key.removeprefix('eval/')} (%)": partial(evaluated, key=key) for key in keys},
        f"clipped, c ≤ {half} (%)": partial(_clipped, low=1, high=half),
        f"clipped, c > {half} (%)": partial(_clipped, low=half + 1, high=branch.k - 1),
        "correct in training (%)": reward,
        "Pearson r": correlation_since,
    }


def _trained(run: StudyRun, begin: int) -> list[int]:
    """Steps from `begin` on; an archived run's bin must lie after it as a whole."""
    return [step for step in run.series("reward/mean") if step - run.bin_steps + 1 >= begin]


def _rows(
    branch: Arm, parent: Arm, quantity: str, values: Callable[[StudyRun, int], Values]
) -> list[Row]:
    """Both means and the paired difference, at the steps that all seeds have."""
    assert branch.runs[0].branch is not None
    begin = int(branch.runs[0].branch["step"])
    by_seed = {run.seed: run for run in parent.runs}
    left = [by_seed[run.seed] for run in branch.runs]
    by_arm = [[values(run, begin) for run in runs] for runs in (left, branch.runs)]
    rows: list[Row] = []
    for step in sorted(set.intersection(*(set(one) for runs in by_arm for one in runs))):
        theirs, ours = ([one[step] for one in runs] for runs in by_arm)
        difference = np.subtract(ours, theirs).tolist()
        found = paired_difference(theirs, ours) if has_spread(difference) else None
        rows.append(
            {
                "branch": branch.label,
                "parent": parent.label,
                "quantity": quantity,
                "step": step,
                "parent mean": float(np.mean(theirs)),
                "branch mean": float(np.mean(ours)),
                "difference": float(np.mean(difference)),
                "low": found.low if found else None,
                "high": found.high if found else None,
                "seeds": len(ours),
            }
        )
    return rows


def _clipped(run: StudyRun, begin: int, *, low: int, high: int) -> Values:
    """Clip fraction of correct rollouts with low <= c <= high."""
    steps, sums = _sums(run, CLIPPED, begin)
    within = [pair for c, pair in sums.items() if low <= c <= high]
    if not within:
        return {}
    weights, values = np.sum(within, axis=0)
    return {step: values[i] / weights[i] for i, step in enumerate(steps) if weights[i] > 0}


def correlation_since(run: StudyRun, begin: int) -> Values:
    """Pearson r over c of correct rollouts' mean deviation and mean advantage since `begin`.

    As in training, there is no r below three values of c, or where either is the same for all c.
    """
    steps, deviations = _sums(run, DEVIATION, begin)
    _, advantages = _sums(run, "correct/advantage", begin)
    both = [c for c in deviations if c in advantages]
    found = {}
    for i, step in enumerate(steps):
        sums = [(*deviations[c][:, i], advantages[c][1, i]) for c in both]
        r = advantage_correlation(*np.array(sums).reshape(-1, 3).T)
        if r is not None:
            found[step] = r
    return found


def _sums(run: StudyRun, name: str, begin: int) -> tuple[list[int], dict[int, np.ndarray]]:
    """Sums over the last `MAX_WINDOW` steps from `begin` on; every rollout counts the same.

    Returns:
        Steps, without the first ones (`window_of`), which rest on few rollouts; by c, [2, steps]
        float64: number of correct rollouts, sum of `per_c/{name}` over them.
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
    """Draw parents and branches of one quantity; `lines`: all labels, which decide the looks."""
    scale = _scale(rows[0])
    over_steps(axis, ylabel=rows[0]["quantity"])
    drawn = set()
    for branch in distinct(rows, "branch"):
        chosen = select(rows, branch=branch)
        for side in ("parent", "branch"):
            label = chosen[0][side]
            if label in drawn:
                continue  # several branches left the same run
            drawn.add(label)
            look = arm_style(lines.index(label))
            look["marker"] = look["marker"] if len(chosen) < MOST_MARKED else ""
            means = scale * column(chosen, f"{side} mean")
            axis.plot(column(chosen, "step"), means, label=label, **look)
        last = chosen[-1]
        if last["low"] is not None:  # the difference's interval, around the branch's last mean
            mean = scale * last["branch mean"]
            half = scale * (last["high"] - last["low"]) / 2
            least, most = (0, 100) if scale == 100 else (-1, 1)
            axis.errorbar(
                [last["step"]],
                [mean],
                yerr=[[mean - max(mean - half, least)], [min(mean + half, most) - mean]],
                color=arm_style(lines.index(branch))["color"],
                capsize=2.5,
                elinewidth=0.8,
                label="_",
            )


def _scale(row: Row) -> float:
    return 100 if "%" in row["quantity"] else 1


def _at_the_end(branch: Arm, rows: Sequence[Row]) -> str:
    """State the last difference of each quantity."""
    chosen = {row["quantity"]: row for row in select(rows, branch=branch.label)}
    parts = []
    for quantity, row in chosen.items():
        scale = _scale(row)
        text = f"{scale * row['difference']:+.2f}"
        if row["low"] is not None:
            text += f" [{scale * row['low']:+.2f}, {scale * row['high']:+.2f}]"
        parts.append(f"{quantity.removesuffix(' (%)')} {text} at {row['step']}")
    parent = next(iter(chosen.values()))["parent"] if chosen else ""
    return f"{branch.label} minus {parent} (shares in points): {'; '.join(parts)}."
