"""Figures of problems: the spectrum of solve rates, and who solves which problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable

from gapo_megatron.evaluate.heat_map import MOST_PERCENT, difference_limit, draw_difference
from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.exhibit import Exhibit
from gapo_megatron.ops.report.runs import Rates, Run, Values
from gapo_megatron.ops.report.series import (
    NoData,
    Row,
    curve_rows,
    window_of,
    window_text,
    windowed,
)
from gapo_megatron.ops.report.style import (
    HATCHES,
    c_colour,
    column,
    legend_below,
    outer_names,
    over_steps,
    panels,
    thinned,
    wrapped,
)


def spectrum(comparison: Comparison) -> Exhibit:
    """Share of the groups that have c correct rollouts, over training."""
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
        _draw_spectrum(axis, [row for row in rows if row["arm"] == arm.label], arm.k)
    outer_names(axes)
    most = max(range(len(arms)), key=lambda place: arms[place].k)
    legend_below(figure, axes[most], title="c (correct of a group)", handle_length=1.0)
    return Exhibit(
        aid="Share of the groups with c correct rollouts, against the step, from c = 0 (dark) to "
        "c = k (light). Both ends are hatched: all rollouts of such a group have the same reward, "
        "so their advantage is 0 and they do not change the weights.",
        rows=rows,
        figure=figure,
        notes=[f"Each point is {window_text(window)}, averaged over seeds."],
    )


def _draw_spectrum(axis: Axes, rows: Sequence[Row], k: int) -> None:
    by_c = [thinned([row for row in rows if row["c"] == c]) for c in range(k + 1)]
    steps = column(by_c[0], "step")
    shares = [100 * column(layer, "mean") for layer in by_c]
    layers = axis.stackplot(
        steps,
        shares,
        labels=[str(c) for c in range(k + 1)],
        colors=[c_colour(c, 0, k) for c in range(k + 1)],
        linewidth=0.3,
        edgecolor="white",
    )
    for c, layer in enumerate(layers):
        layer.set_hatch(HATCHES[1] if c in (0, k) else "")


def solve_rates(comparison: Comparison) -> Exhibit:
    """The paper's heat map: the first arm's solve rate minus another's, per problem and step."""
    first, *others = comparison.curves
    if not others:
        raise NoData("needs two methods")
    rows: list[Row] = []
    shown_arms = []
    shown_pairs = []
    for other in others:
        pair = _of_shared_seeds(first, other)
        found = _differences(*map(_rates, pair))
        rows += [{"first": first.label, "other": other.label, **row} for row in found]
        shown_arms += [other] if found else []
        shown_pairs += [pair] if found else []
    if not rows:
        raise NoData("no evaluations of the same problems at the same step")
    missing = [other.label for other in others if other not in shown_arms]
    figure, axes = panels(len(shown_arms), row_inches=1.6)
    limit = difference_limit(column(rows, "difference"))
    steps = sorted({int(row["step"] or 0) for row in rows})
    for axis, other in zip(axes, shown_arms, strict=True):
        chosen = [row for row in rows if row["other"] == other.label]
        image = _draw_rates(axis, chosen, steps, limit)
        axis.set_title(wrapped(f"{first.label} - {other.label}"))
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
            "Means over the seeds that both methods have, or over all seeds where they share none. "
            "Grey: no verdict is known.",
            f"The colour scale covers {MOST_PERCENT} % of the cells; the others have the colour of "
            f"its ends. {_sampling_note(shown_pairs)}",
            *([f"No data: {', '.join(missing)}."] if missing else []),
        ],
    )


def _of_shared_seeds(first: Arm, other: Arm) -> tuple[Arm, Arm]:
    """Both with the seeds they share: a seed decides the samples that both were evaluated on."""
    shared = set(first.seeds) & set(other.seeds)
    if not shared:
        return first, other
    ours, theirs = ([run for run in arm.runs if run.seed in shared] for arm in (first, other))
    return replace(first, runs=ours), replace(other, runs=theirs)


def _sampling_note(pairs: Sequence[tuple[Arm, Arm]]) -> str:
    """Note on the effect of chance: a cell's standard deviation at a solve rate of one half."""

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
    """Step -> mean over seeds of each problem's solve rate, at steps all seeds have evaluated."""
    steps = set(arm.runs[0].solve_rates).intersection(*(run.solve_rates for run in arm.runs))
    found: dict[int, Rates] = {}
    for step in sorted(steps):
        by_run = [run.solve_rates[step] for run in arm.runs]
        if len({frozenset(one) for one in by_run}) > 1:
            raise NoData(f"the seeds of {arm.label} were evaluated on different problems")
        found[step] = {name: float(np.mean([one[name] for one in by_run])) for name in by_run[0]}
    return found


def _differences(first: Mapping[int, Rates], other: Mapping[int, Rates]) -> list[Row]:
    """Rows of step, problem, difference; problems by their mean over both arms, easiest first."""
    steps = [step for step in first if step in other]
    if not steps or any(first[step].keys() != other[step].keys() for step in steps):
        return []
    both = {
        name: [one[step][name] for one in (first, other) for step in steps]
        for name in first[steps[0]]
    }
    order = sorted(both, key=lambda name: -float(np.nan_to_num(both[name]).mean()))
    return [
        {
            "rank": rank,
            "problem": name,
            "step": step,
            "difference": None
            if math.isnan(difference := first[step][name] - other[step][name])
            else difference,
        }
        for rank, name in enumerate(order, start=1)
        for step in steps
    ]


def _draw_rates(
    axis: Axes, rows: Sequence[Row], steps: Sequence[int], limit: float
) -> ScalarMappable:
    """Problems down, all of `steps` across; grey where these two arms have none."""
    image = np.full((max(int(row["rank"] or 0) for row in rows), len(steps)), np.nan)
    ranks = column(rows, "rank").astype(int) - 1
    image[ranks, np.searchsorted(steps, column(rows, "step"))] = column(rows, "difference")
    axis.set(xlabel="step", ylabel="problem, easiest first", facecolor="0.85")
    ticks = range(0, len(steps), math.ceil(len(steps) / 5))
    axis.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axis.set_yticks([0, len(image) - 1], ["1", str(len(image))])
    axis.grid(False)
    return draw_difference(axis, 100 * image, limit=100 * limit)
