"""Figures of what the clip does to correct rollouts, by c; two are the paper's figures 1 and 3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gapo_megatron.objective.diagnostics import WINDOW
from gapo_megatron.ops.report.arms import Arm, Comparison
from gapo_megatron.ops.report.exhibit import Exhibit
from gapo_megatron.ops.report.learning import (
    OTHER,
    SHARE_LIMITS,
    Shown,
    compare,
    draw_arms,
    seeds_note,
    sharing,
)
from gapo_megatron.ops.report.runs import Run, Values
from gapo_megatron.ops.report.series import (
    NoData,
    Row,
    curve_rows,
    curves,
    interval,
    last_half,
    per_c,
    window_of,
    window_text,
    windowed,
)
from gapo_megatron.ops.report.style import (
    arm_style,
    c_style,
    column,
    legend_below,
    outer_names,
    over_steps,
    panels,
    same_range,
    thinned,
    wrapped,
)

DEVIATION = "ratio_deviation"
DRIFT = "ratio_abs_deviation"
CLIPPED = "clip_fraction_sequences"
CORRELATION = "ratio/advantage_correlation_window"
YLABELS = {
    CLIPPED: "rollouts clipped (%)",
    DRIFT: "mean $|s - 1|$ (%)",
    DEVIATION: "mean $s - 1$ (%)",
}
LIMITS = {CLIPPED: SHARE_LIMITS, DRIFT: (0.0, np.inf), DEVIATION: (-np.inf, np.inf)}
"""Intervals end there: no value can lie beyond."""
CLIPPED_NOTE = (
    "Every rollout counts the same, whatever its length; where a method clips single tokens, a "
    "rollout counts by the share of its tokens that are clipped. The paper's figure counts tokens: "
    "that is per_c/correct/clip_fraction_tokens in metrics.jsonl."
)
BY_C = {"clip fraction": CLIPPED, "drift": DRIFT, "deviation": DEVIATION}


def deviation_per_c(comparison: Comparison) -> Exhibit:
    """The paper's figure 1: mean deviation of the ratio from 1, a panel per arm, a curve per c."""
    rows, window = per_c_rows(comparison.curves, DEVIATION)
    return Exhibit(
        aid="Mean of s - 1 over correct rollouts, against the step; s is the ratio of the new to "
        "the old probability. One curve per c, the number of correct rollouts in the group: dark "
        "for small c, light for large c. Above 0 the updates of a step raised the probability of "
        "these rollouts, below 0 they lowered it. Rises and falls cancel in this mean.",
        rows=rows,
        figure=_per_c_figure(comparison.curves, rows, DEVIATION),
        notes=[_window_note(window, comparison.curves)],
    )


def clip_fraction_per_c(comparison: Comparison) -> Exhibit:
    """Share of correct rollouts clipped, a panel per arm, a curve per c.

    The paper's figure 3 has tokens instead; of one c both differ by the lengths of rollouts alone.
    """
    rows, window = per_c_rows(comparison.curves, CLIPPED)
    return Exhibit(
        aid="Share of the correct rollouts whose ratio is clipped, against the step. One curve per "
        "c, the number of correct rollouts in the group: dark for small c, light for large c.",
        rows=rows,
        figure=_per_c_figure(comparison.curves, rows, CLIPPED),
        notes=[CLIPPED_NOTE, _window_note(window, comparison.curves)],
    )


def by_c(comparison: Comparison) -> Exhibit:
    """Clip, drift and deviation over c: means of the last half of training, seed intervals."""
    rows: list[Row] = []
    for word, name in BY_C.items():
        for arm in comparison.curves:
            num_steps = min(run.num_steps for run in arm.runs)
            found = [last_half(run, name, num_steps=num_steps) for run in arm.runs]
            rows += [
                {
                    "arm": arm.label,
                    "quantity": _quantity(word, arm),
                    "c": c,
                    **interval([one[c] for one in found]),
                }
                for c in sorted(set.intersection(*map(set, found)))
            ]
    if not rows:
        raise NoData(f"no run has per_c/correct/{CLIPPED}")
    drawn = dict.fromkeys(str(row["quantity"]) for row in rows)
    shared = sharing(comparison.curves, rows)
    if len(shared) == 1:
        contents = [(quantity, shown) for shown in shared for quantity in drawn]
    else:
        words = list(dict.fromkeys(map(_word, drawn)))
        contents = [(_quantity(word, shown[OTHER]), shown) for shown in shared for word in words]

    def draw(axis: Axes, quantity: str, shown: Shown) -> None:
        _draw_by_c(axis, [row for row in rows if row["quantity"] == quantity], shown)
        axis.set(xlabel="c", ylabel=YLABELS[BY_C[_word(quantity)]])
        if len(shared) == 1:
            axis.set(xlabel="c (correct of a group)", title=wrapped(quantity))

    return Exhibit(
        aid="Means over the last half of training, of correct rollouts, against c, the number of "
        "correct rollouts in the group. Clip fraction: share of the rollouts whose ratio is "
        "clipped. Drift: mean of |s - 1|. Deviation: mean of s - 1, in which rises and falls "
        "cancel.",
        rows=rows,
        figure=compare(
            contents, draw, num_columns=2 if len(shared) == 1 else len(contents) // len(shared)
        ),
        notes=[
            "s is the ratio of the new to the old probability: of a sequence or of a token, "
            "whichever the method clips.",
            CLIPPED_NOTE,
            seeds_note(comparison.curves).replace("Bands", "Bars").replace("bands", "bars"),
        ],
    )


def _quantity(word: str, arm: Arm) -> str:
    """Clip fractions are of one kind; ratios of tokens deviate far more than those of sequences."""
    return word if BY_C[word] == CLIPPED else f"{word}, {arm.method.ratio} ratio"


def _word(quantity: str) -> str:
    return quantity.partition(",")[0]


def _draw_by_c(axis: Axes, rows: Sequence[Row], shown: Shown) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for place, (label, arm) in enumerate(shown.items()):
        chosen = [row for row in rows if row["arm"] == arm.label]
        if not chosen:
            continue
        limits = LIMITS[BY_C[_word(str(chosen[0]["quantity"]))]]
        means = 100 * column(chosen, "mean")
        low, high = (100 * np.clip(column(chosen, key), *limits) for key in ("low", "high"))
        axis.errorbar(
            column(chosen, "c") + 0.1 * (place - (len(shown) - 1) / 2),  # bars side by side
            means,
            yerr=[means - low, high - means],
            label=label,
            elinewidth=0.8,
            capsize=1.5,
            **arm_style(place),
        )


def correlation(comparison: Comparison) -> Exhibit:
    """The paper's figure of the IS-advantage correlation."""
    rows = correlation_rows(comparison.curves)

    def draw(axis: Axes, _: str, shown: Shown) -> None:
        draw_correlation(axis, rows, shown)

    return Exhibit(
        aid="Correlation between the mean deviation of the ratio, s - 1, and the mean advantage of "
        "correct rollouts, over c, against the step. At 1, deviation grows in proportion to "
        "advantage; at 0 it does not depend on it; below 0, rollouts of small c, which have the "
        "larger advantages, deviate less or downwards.",
        rows=rows,
        figure=compare([("", shown) for shown in sharing(comparison.curves, rows)], draw),
        notes=[
            f"Pearson's r; each mean is over the last W = {WINDOW} steps, before step "
            f"{WINDOW - 1} over all steps so far.",
            seeds_note(comparison.curves),
        ],
    )


def correlation_rows(arms: Sequence[Arm]) -> list[Row]:
    """Rows of the correlation as the runs recorded it."""
    return curves(arms, lambda run: run.series(CORRELATION), what=CORRELATION)


def draw_correlation(axis: Axes, rows: Sequence[Row], shown: Shown) -> None:
    """Pearson's r over steps; a line where the window is full."""
    axis.set_ylabel("Pearson r")
    axis.axhline(0, color="0.4", linewidth=0.6)
    draw_arms(axis, rows, shown, limits=(-1, 1))
    if any(int(row["step"] or 0) >= WINDOW - 1 for row in rows):
        axis.axvline(
            WINDOW - 1, color="0.2", linewidth=0.8, linestyle=":", label=f"W = {WINDOW} steps done"
        )
    axis.set_ylim(-1.05, 1.05)


def per_c_rows(arms: Sequence[Arm], name: str) -> tuple[list[Row], int]:
    """Windowed means over steps of `per_c/correct/{name}` for every c; and the window in steps."""
    window = window_of([run for arm in arms for run in arm.runs])
    rows: list[Row] = []
    for c in sorted({c for arm in arms for run in arm.runs for c in per_c(run, name)}):

        def smooth(run: Run, c: int = c) -> Values:
            values, weights = per_c(run, name).get(c, ({}, {}))
            steps = list(run.series("reward/mean"))
            return windowed(values, steps, window, weights=weights, bin_steps=run.bin_steps)

        with_c = [arm for arm in arms if all(c in per_c(run, name) for run in arm.runs)]
        rows += curve_rows(with_c, smooth, c=c)
    if not rows:
        raise NoData(f"no run has per_c/correct/{name}")
    return rows, window


def draw_per_c(axis: Axes, rows: Sequence[Row], arm: Arm, name: str) -> None:
    """A curve for each c, in percent."""
    over_steps(axis, [arm.label])
    axis.set_ylabel(YLABELS[name])
    for c in sorted({int(row["c"] or 0) for row in rows}):
        chosen = thinned([row for row in rows if row["arm"] == arm.label and row["c"] == c])
        axis.plot(
            column(chosen, "step"),
            100 * column(chosen, "mean"),
            label=str(c),
            **c_style(c, arm.k),
        )


def _per_c_figure(arms: Sequence[Arm], rows: Sequence[Row], name: str) -> Figure:
    drawn = [arm for arm in arms if any(row["arm"] == arm.label for row in rows)]
    # Ratios of tokens deviate far more than those of sequences.
    by_ratio = [
        [place for place, arm in enumerate(drawn) if arm.method.ratio == ratio]
        for ratio in dict.fromkeys(arm.method.ratio for arm in drawn)
    ]
    share_y = name != DEVIATION or len(by_ratio) < 2
    figure, axes = panels(len(drawn), share_y=share_y)
    for axis, arm in zip(axes, drawn, strict=True):
        draw_per_c(axis, [row for row in rows if row["arm"] == arm.label], arm, name)
        axis.set_title(wrapped(arm.label))
    for places in by_ratio if not share_y else ():
        same_range([axes[place] for place in places])
    outer_names(axes, share_y=share_y)
    most = max(range(len(drawn)), key=lambda place: drawn[place].k)
    legend_below(figure, axes[most], title="c (correct of a group)", handle_length=1.9)
    return figure


def _window_note(window: int, arms: Sequence[Arm]) -> str:
    numbers = sorted({len(arm.runs) for arm in arms})
    point = f"Each point is {window_text(window)}"
    if numbers == [1]:
        return f"{point}."
    shown = " to ".join(map(str, {numbers[0]: 0, numbers[-1]: 0}))
    return f"{point}, averaged over seeds ({shown}). The CSV has the intervals over seeds."
