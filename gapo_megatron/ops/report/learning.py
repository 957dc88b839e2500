"""Figures of what was learned: held-out pass@k, solve rates by problem, groups by c."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from gapo_megatron.evaluate.heat_map import MOST_PERCENT, difference_limit, draw_difference
from gapo_megatron.evaluate.statistics import SOLVED_ABOVE, has_spread, mean_interval, num_solved
from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.runs import Rates, Run, Values
from gapo_megatron.ops.report.series import (
    SEED,
    NoData,
    Row,
    curve_rows,
    distinct,
    pass_keys,
    select,
    window_of,
    window_text,
    windowed,
)
from gapo_megatron.ops.report.style import (
    HATCHES,
    NUM_COLUMNS,
    Exhibit,
    arm_style,
    c_colour,
    column,
    draw_band,
    legend_below,
    outer_names,
    over_steps,
    panels,
    same_range,
    thinned,
    wrapped,
)

MOST_ARMS = 3
"""Most arms in one panel; with more, bands and colours cannot be told apart."""
OTHER = "the method above the panel"
SHARE_LIMITS = (0.0, 1.0)
LATE_SHARE = 0.2
"""Last steps of a run, over whose evaluations solved problems are counted: about the paper's."""

Shown = Mapping[str, Arm]
"""Arms of a panel by their names in the legend; the order decides each one's `arm_style`."""


# -- panels that compare arms --------------------------------------------------------------------


def draw_arms(
    axis: Axes,
    rows: Sequence[Row],
    shown: Shown,
    *,
    first_place: int = 0,
    name: str = "",
    **how: Any,
) -> None:
    """Draw a line and a band for each arm that has rows.

    Args:
        axis: the panel.
        rows: rows with arm, step, mean, low, high.
        shown: the arms.
        first_place: `arm_style` place of the first arm.
        name: text that the legend adds to an arm's name.
        how: `limits`, `scale` and `points` of `draw_band`.
    """
    present = {row["arm"] for row in rows}
    over_steps(axis, [arm.label for arm in shown.values() if arm.label in present])
    for place, (label, arm) in enumerate(shown.items(), start=first_place):
        if chosen := select(rows, arm=arm.label):
            draw_band(axis, chosen, label=f"{label} {name}".strip(), **how, **arm_style(place))


def sharing(arms: Sequence[Arm], rows: Sequence[Row]) -> list[Shown]:
    """Divide the arms that have rows among panels.

    Up to `MOST_ARMS` share one panel; more have one panel each, with the first arm beside it.
    """
    present = {row["arm"] for row in rows}
    drawn = [arm for arm in arms if arm.label in present]
    if len(drawn) <= MOST_ARMS:
        return [{arm.label: arm for arm in drawn}]
    first, *others = drawn
    return [{first.label: first, OTHER: other} for other in others]


def compare(
    contents: Sequence[tuple[str, Shown]],
    draw: Callable[[Axes, str, Shown], None],
    *,
    num_columns: int = NUM_COLUMNS,
) -> Figure:
    """Draw a figure with one panel per entry of `contents`.

    Args:
        contents: quantity and arms of each panel; panels of one quantity share their y range.
        draw: draws one panel with its axis labels.
        num_columns: panels in a row.
    """
    one_quantity = len({quantity for quantity, _ in contents}) == 1
    is_single = OTHER not in contents[0][1]
    figure, axes = panels(
        len(contents),
        num_columns=num_columns,
        row_inches=1.5 if is_single else 1.1,
        share_y=one_quantity,
    )
    by_quantity: dict[str, list[Axes]] = {}
    for place, (axis, (quantity, shown)) in enumerate(zip(axes, contents, strict=True)):
        draw(axis, quantity, shown)
        by_quantity.setdefault(quantity, []).append(axis)
        if not is_single and one_quantity:
            axis.set_title(wrapped(shown[OTHER].label))
        elif not is_single and place % num_columns == 0:
            axis.set_title(shown[OTHER].label, loc="left")  # for the whole row of panels
    for alike in by_quantity.values():
        same_range(alike)
    outer_names(axes, num_columns=num_columns, share_y=one_quantity)
    legend_below(figure, *axes)
    return figure


def seeds_note(arms: Sequence[Arm], *, word: str = "Bands") -> str:
    """Say how many seeds there are, and what the bands (or bars) mean."""
    numbers = sorted({len(arm.runs) for arm in arms})
    if numbers == [1]:
        return f"One seed per method: no {word.lower()}."
    counts = ", ".join(f"{arm.label} {len(arm.runs)}" for arm in arms)
    if len(numbers) == 1:
        counts = f"{numbers[0]} each"
    return (
        f"{word}: 95 % Student-t intervals of the mean over seeds ({counts}), cut off where values "
        "are impossible."
    )


# -- accuracy --------------------------------------------------------------------------------------


def reward_rows(arms: Sequence[Arm]) -> tuple[list[Row], int]:
    """Rows of the training reward, smoothed; and the window in steps."""
    window = window_of([run for arm in arms for run in arm.runs])

    def smooth(run: Run) -> Values:
        values = run.series("reward/mean")
        return windowed(values, list(values), window, bin_steps=run.bin_steps)

    return curve_rows(arms, smooth, what="reward/mean"), window


def pass_at_k(comparison: Comparison) -> Exhibit:
    """Held-out pass@1 and pass@k over training."""
    rows = pass_rows(comparison.curves)
    names = distinct(rows, "metric")
    shared = sharing(comparison.curves, rows)
    has_seeds = any(len(arm.runs) > 1 for arm in comparison.curves)

    def draw(axis: Axes, metric: str, shown: Shown) -> None:
        draw_pass(axis, rows, shown, metric)

    return Exhibit(
        aid="Accuracy on held-out problems, against the step. pass@1 is the chance that one answer "
        "is correct, pass@k the chance that at least one of k is.",
        rows=rows,
        figure=compare(
            [(name, shown) for shown in shared for name in names],
            draw,
            num_columns=1 if len(shared) == 1 else len(names),
        ),
        notes=["Thin lines: single seeds. " * has_seeds + seeds_note(comparison.curves)],
    )


def pass_rows(arms: Sequence[Arm]) -> list[Row]:
    """Rows of pass@1 and of pass@k for the largest k all runs have; with a column per seed."""
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    rows: list[Row] = []
    for key in pass_keys(arms):
        values = operator.methodcaller("series", key)
        found = curve_rows(arms, values, what=key, metric=key.removeprefix("eval/"))
        by_arm = {arm.label: {run.seed: run.series(key) for run in arm.runs} for arm in arms}
        for row in found:
            by_seed = by_arm[row["arm"]]
            row |= {f"{SEED}{s}": by_seed.get(s, {}).get(row["step"]) for s in seeds}
        rows += found
    return rows


def draw_pass(axis: Axes, rows: Sequence[Row], shown: Shown, metric: str, **how: Any) -> None:
    """Draw percent solved over steps; `how`: `first_place` and `name` of `draw_arms`."""
    axis.set_ylabel(f"{metric} (%)")
    chosen = select(rows, metric=metric)
    draw_arms(axis, chosen, shown, limits=SHARE_LIMITS, scale=100, points=True, **how)


# -- groups by c -----------------------------------------------------------------------------------


def spectrum(comparison: Comparison) -> Exhibit:
    """Share of the groups with c correct rollouts, over training."""
    arms = comparison.curves
    window = window_of([run for arm in arms for run in arm.runs])
    rows: list[Row] = []
    for c in range(max(arm.k for arm in arms) + 1):
        key = f"per_c/group_share/c{c}"

        def smooth(run: Run, key: str = key) -> Values:
            steps = list(run.series("reward/mean"))
            return windowed(run.series(key), steps, window, bin_steps=run.bin_steps)

        rows += curve_rows([arm for arm in arms if c <= arm.k], smooth, c=c)
    if not rows:
        raise NoData("no run has per_c/group_share")
    figure, axes = panels(len(arms))
    for axis, arm in zip(axes, arms, strict=True):
        axis.set_title(wrapped(arm.label))
        over_steps(axis, [arm.label])
        axis.set(ylabel="groups (%)", ylim=(0, 100))
        axis.margins(x=0)
        by_c = [thinned(select(rows, arm=arm.label, c=c)) for c in range(arm.k + 1)]
        layers = axis.stackplot(
            column(by_c[0], "step"),
            [100 * column(layer, "mean") for layer in by_c],
            labels=[str(c) for c in range(arm.k + 1)],
            colors=[c_colour(c, 0, arm.k) for c in range(arm.k + 1)],
            linewidth=0.3,
            edgecolor="white",
        )
        for c, layer in enumerate(layers):
            layer.set_hatch(HATCHES[1] if c in (0, arm.k) else "")
    outer_names(axes)
    most = max(range(len(arms)), key=lambda place: arms[place].k)
    legend_below(figure, axes[most], title="c (correct of a group)", handle_length=1.0)
    return Exhibit(
        aid="Share of the groups with c correct rollouts, against the step, from c = 0 (dark) to "
        "c = k (light). Both ends are hatched: all rollouts of such a group have the same reward, "
        "so their advantage is 0.",
        rows=rows,
        figure=figure,
        notes=[f"Each point is {window_text(window)}, averaged over seeds."],
    )


# -- problem by problem ----------------------------------------------------------------------------


def solve_rates(comparison: Comparison) -> Exhibit:
    """The paper's heat map: the first arm's solve rate minus another's, per problem and step."""
    first, *others = comparison.curves
    if not others:
        raise NoData("needs two methods")
    rows: list[Row] = []
    pairs: dict[str, tuple[Arm, Arm]] = {}
    for other in others:
        pair = _of_shared_seeds(first, other)
        if found := _differences(*map(_rates, pair)):
            rows += [{"first": first.label, "other": other.label, **row} for row in found]
            pairs[other.label] = pair
    if not rows:
        raise NoData("no evaluations of the same problems at the same step")
    missing = [other.label for other in others if other.label not in pairs]
    figure, axes = panels(len(pairs), row_inches=1.6)
    limit = difference_limit(column(rows, "difference"))
    steps = sorted({row["step"] for row in rows})
    for axis, label in zip(axes, pairs, strict=True):
        image = _draw_rates(axis, select(rows, other=label), steps, limit)
        axis.set_title(wrapped(f"{first.label} - {label}"))
    outer_names(axes)
    figure.set_figheight(figure.get_figheight() + 0.4)
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=40, pad=0.02, extend="both")
    bar.set_label("difference of solve rates (percentage points)")
    return Exhibit(
        aid=f"Blue where {first.label} solves a held-out problem more often than the other method, "
        "red where less often; problems from the easiest at the top to the hardest.",
        rows=rows,
        figure=figure,
        notes=[
            "Means over the seeds that both methods have, or over all seeds if they share none. "
            "Grey: no verdict is known.",
            f"The colour scale covers {MOST_PERCENT} % of the cells; the others have the colour of "
            f"its ends. {_sampling_note(list(pairs.values()))}",
            *_solved_notes([first, *others]),
            *([f"No data: {', '.join(missing)}."] if missing else []),
        ],
    )


def _solved_notes(arms: Sequence[Arm]) -> list[str]:
    """State how many problems of late evaluations each arm solves above `SOLVED_ABOVE`."""
    shown = []
    for arm in arms:
        begin = (1 - LATE_SHARE) * min(run.num_steps for run in arm.runs)
        late = [[r for step, r in run.solve_rates.items() if step >= begin] for run in arm.runs]
        if not all(late):
            continue
        numbers = [float(np.mean([num_solved(one.values()) for one in rates])) for rates in late]
        text = f"{arm.label} {np.mean(numbers):.1f}"
        if has_spread(numbers):
            found = mean_interval(numbers)
            text += f" ± {found.mean - found.low:.1f}"
        shown.append(f"{text} of {len(late[0][0])}")
    if not shown:
        return []
    return [
        f"Problems with a solve rate above {100 * SOLVED_ABOVE:g} %, mean over the evaluations of "
        f"the last {100 * LATE_SHARE:.0f} % of the steps and over seeds: {', '.join(shown)}."
    ]


def _of_shared_seeds(first: Arm, other: Arm) -> tuple[Arm, Arm]:
    """Both arms with their shared seeds only: a seed decides the evaluation's samples."""
    shared = set(first.seeds) & set(other.seeds)
    if not shared:
        return first, other
    ours, theirs = ([run for run in arm.runs if run.seed in shared] for arm in (first, other))
    return replace(first, runs=ours), replace(other, runs=theirs)


def _sampling_note(pairs: Sequence[tuple[Arm, Arm]]) -> str:
    """State a cell's standard deviation from sampling, at a solve rate of one half."""

    def variance(arm: Arm) -> float:
        samples = [run.config.evaluation.samples_per_prompt for run in arm.runs]
        return 0.25 * sum(1 / number for number in samples) / len(samples) ** 2

    points = [100 * math.sqrt(variance(first) + variance(other)) for first, other in pairs]
    shown = " to ".join(dict.fromkeys(f"{one:.0f}" for one in (min(points), max(points))))
    return (
        "By chance alone, a cell has a standard deviation of "
        f"{shown} points where both methods solve the problem half of the time."
    )


def _rates(arm: Arm) -> dict[int, Rates]:
    """Step -> mean solve rate over seeds by problem, at the steps that all seeds evaluated."""
    steps = set(arm.runs[0].solve_rates).intersection(*(run.solve_rates for run in arm.runs))
    found: dict[int, Rates] = {}
    for step in sorted(steps):
        by_run = [run.solve_rates[step] for run in arm.runs]
        if len({frozenset(one) for one in by_run}) > 1:
            raise NoData(f"the seeds of {arm.label} were evaluated on different problems")
        found[step] = {name: float(np.mean([one[name] for one in by_run])) for name in by_run[0]}
    return found


def _differences(first: Mapping[int, Rates], other: Mapping[int, Rates]) -> list[Row]:
    """Rows of rank, problem, step, difference; problems from the easiest for both arms on."""
    steps = [step for step in first if step in other]
    if not steps or any(first[step].keys() != other[step].keys() for step in steps):
        return []
    both = {
        name: [one[step][name] for one in (first, other) for step in steps]
        for name in first[steps[0]]
    }
    order = sorted(both, key=lambda name: -float(np.nan_to_num(both[name]).mean()))
    rows: list[Row] = []
    for rank, name in enumerate(order, start=1):
        for step in steps:
            found = first[step][name] - other[step][name]
            difference = None if math.isnan(found) else found
            rows.append({"rank": rank, "problem": name, "step": step, "difference": difference})
    return rows


def _draw_rates(
    axis: Axes, rows: Sequence[Row], steps: Sequence[int], limit: float
) -> ScalarMappable:
    """Draw problems (rows) by `steps` (columns); grey where these two arms have no value."""
    image = np.full((max(row["rank"] for row in rows), len(steps)), np.nan)
    ranks = column(rows, "rank").astype(int) - 1
    image[ranks, np.searchsorted(steps, column(rows, "step"))] = column(rows, "difference")
    axis.set(xlabel="step", ylabel="problem, easiest first", facecolor="0.85")
    ticks = range(0, len(steps), math.ceil(len(steps) / 5))
    axis.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axis.set_yticks([0, len(image) - 1], ["1", str(len(image))])
    axis.grid(False)
    return draw_difference(axis, 100 * image, limit=100 * limit)
