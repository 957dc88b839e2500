"""Figures of how the clip treats correct rollouts, by c; two are the paper's figures 1 and 3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gapo_megatron.objective.diagnostics import WINDOW
from gapo_megatron.ops.report.arms import Arm, Comparison
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
    distinct,
    interval,
    last_half,
    per_c,
    select,
    window_of,
    window_text,
    windowed,
)
from gapo_megatron.ops.report.style import (
    LINE_STYLES,
    Exhibit,
    arm_style,
    c_colour,
    column,
    draw_bars,
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
CLIPPED_TOKENS = "clip_fraction_tokens"
CORRELATION = "ratio/advantage_correlation_window"
YLABELS = {
    CLIPPED: "rollouts clipped (%)",
    CLIPPED_TOKENS: "tokens clipped (%)",
    DRIFT: "mean $|s - 1|$ (%)",
    DEVIATION: "mean $s - 1$ (%)",
}
LIMITS = {CLIPPED: SHARE_LIMITS, DRIFT: (0.0, np.inf), DEVIATION: (-np.inf, np.inf)}
"""Smallest and largest possible value; intervals are cut off there."""
CLIPPED_NOTE = (
    "Of clipped rollouts, every one counts the same, whatever its length; where a method clips "
    "single tokens, a rollout counts by the share of its tokens that are clipped."
)
BY_C = {"clip fraction": CLIPPED, "drift": DRIFT, "deviation": DEVIATION}


# -- over training, a curve per c ------------------------------------------------------------------


def deviation_per_c(comparison: Comparison) -> Exhibit:
    """The paper's figure 1: mean deviation of the ratio from 1; a panel per arm, a curve per c."""
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
    """The paper's token clip fraction of correct rollouts; a panel per arm, a curve per c.

    Of rollouts, where a run or archive does not have it of tokens.
    """
    runs = [run for arm in comparison.curves for run in arm.runs]
    has_tokens = all(run.keys(rf"per_c/correct/{CLIPPED_TOKENS}/c\d+") for run in runs)
    name, counted, note = CLIPPED, "correct rollouts whose ratio is clipped", CLIPPED_NOTE
    if has_tokens:
        name, counted = CLIPPED_TOKENS, "tokens of correct rollouts that are clipped"
        note = (
            "Every token counts the same. Where a method clips the ratio of a sequence, all tokens "
            "of a clipped rollout are clipped."
        )
    rows, window = per_c_rows(comparison.curves, name)
    return Exhibit(
        aid=f"Share of the {counted}, against the step. One curve per c, the number of correct "
        "rollouts in the group: dark for small c, light for large c.",
        rows=rows,
        figure=_per_c_figure(comparison.curves, rows, name),
        notes=[note, _window_note(window, comparison.curves)],
    )


def per_c_rows(arms: Sequence[Arm], name: str) -> tuple[list[Row], int]:
    """Rows of `per_c/correct/{name}` for every c, smoothed; and the window in steps."""
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
    """Draw a curve for each c, in percent: dark for scarce correct rollouts."""
    over_steps(axis, [arm.label])
    axis.set_ylabel(YLABELS[name])
    for c in sorted({row["c"] for row in rows}):
        chosen = thinned(select(rows, arm=arm.label, c=c))
        axis.plot(
            column(chosen, "step"),
            100 * column(chosen, "mean"),
            label=str(c),
            color=c_colour(c, 1, arm.k - 1),
            linestyle=LINE_STYLES[(c - 1) % len(LINE_STYLES)],
        )


def _per_c_figure(arms: Sequence[Arm], rows: Sequence[Row], name: str) -> Figure:
    drawn = [arm for arm in arms if select(rows, arm=arm.label)]
    # Token ratios deviate far more than sequence ratios: each kind has its own y range.
    by_ratio = [
        [place for place, arm in enumerate(drawn) if arm.method.ratio == ratio]
        for ratio in dict.fromkeys(arm.method.ratio for arm in drawn)
    ]
    share_y = name != DEVIATION or len(by_ratio) < 2
    figure, axes = panels(len(drawn), share_y=share_y)
    for axis, arm in zip(axes, drawn, strict=True):
        draw_per_c(axis, select(rows, arm=arm.label), arm, name)
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
    shown = " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
    return f"{point}, averaged over seeds ({shown}). The CSV has the intervals over seeds."


# -- the last half of training, against c ----------------------------------------------------------


def by_c(comparison: Comparison) -> Exhibit:
    """Clip fraction, drift and deviation against c: means over the last half of training."""
    rows: list[Row] = []
    for word, name in BY_C.items():
        for arm in comparison.curves:
            num_steps = min(run.num_steps for run in arm.runs)
            found = [last_half(run, name, num_steps=num_steps) for run in arm.runs]
            for c in sorted(set.intersection(*map(set, found))):
                row: Row = {"arm": arm.label, "quantity": _quantity(word, arm), "c": c}
                rows.append(row | interval([one[c] for one in found]))
    if not rows:
        raise NoData(f"no run has per_c/correct/{CLIPPED}")
    drawn = distinct(rows, "quantity")
    shared = sharing(comparison.curves, rows)
    if len(shared) == 1:
        contents = [(quantity, shown) for shown in shared for quantity in drawn]
    else:  # a row of panels per arm, in it that arm's own kind of ratio
        words = list(dict.fromkeys(map(_word, drawn)))
        contents = [(_quantity(word, shown[OTHER]), shown) for shown in shared for word in words]

    def draw(axis: Axes, quantity: str, shown: Shown) -> None:
        name = BY_C[_word(quantity)]
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        for place, (label, arm) in enumerate(shown.items()):
            chosen = select(rows, quantity=quantity, arm=arm.label)
            x = column(chosen, "c") + 0.1 * (place - (len(shown) - 1) / 2)  # bars side by side
            look = {"label": label, "capsize": 1.5, **arm_style(place)}
            if chosen:
                draw_bars(axis, x, chosen, limits=LIMITS[name], **look)
        axis.set(xlabel="c", ylabel=YLABELS[name])
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
            seeds_note(comparison.curves, word="Bars"),
        ],
    )


def _quantity(word: str, arm: Arm) -> str:
    """Name of a panel; deviations of token and sequence ratios differ too much to share one."""
    return word if BY_C[word] == CLIPPED else f"{word}, {arm.method.ratio} ratio"


def _word(quantity: str) -> str:
    return quantity.partition(",")[0]


# -- correlation of deviation and advantage --------------------------------------------------------


def correlation(comparison: Comparison) -> Exhibit:
    """The paper's figure of the IS-advantage correlation."""
    rows = correlation_rows(comparison.curves)

    def draw(axis: Axes, _: str, shown: Shown) -> None:
        draw_correlation(axis, rows, shown)

    return Exhibit(
        aid="Correlation between the mean deviation of the ratio, s - 1, and the mean advantage of "
        "correct rollouts, over c, against the step. At 1, the means lie on a straight line that "
        "rises with the advantage, however steeply; at -1, on one that falls: rollouts of small c, "
        "which have the larger advantages, then deviate less, or downwards.",
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
    return curve_rows(arms, lambda run: run.series(CORRELATION), what=CORRELATION)


def draw_correlation(axis: Axes, rows: Sequence[Row], shown: Shown) -> None:
    """Draw Pearson's r over steps, and a line at the step where the window is full."""
    axis.set_ylabel("Pearson r")
    axis.axhline(0, color="0.4", linewidth=0.6)
    draw_arms(axis, rows, shown, limits=(-1, 1))
    if any(row["step"] >= WINDOW - 1 for row in rows):
        axis.axvline(
            WINDOW - 1, color="0.2", linewidth=0.8, linestyle=":", label=f"W = {WINDOW} steps done"
        )
    axis.set_ylim(-1.05, 1.05)
