"""Figures of a report: curves over training, curves per c, and the time of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gapo_megatron.objective.diagnostics import WINDOW
from gapo_tools.reporting.arms import Arm, Comparison
from gapo_tools.reporting.correlation import window_bounds
from gapo_tools.reporting.runs import Run, Values
from gapo_tools.reporting.series import (
    NoData,
    Row,
    curve_rows,
    distinct,
    pass_keys,
    per_c,
    select,
    window_of,
    windowed,
)
from gapo_tools.reporting.style import (
    COLOURS,
    LINE_STYLES,
    Exhibit,
    arm_style,
    c_colour,
    column,
    draw_band,
    legend_below,
    outer_names,
    over_steps,
    panels,
    widen,
    wrapped,
)

CORRELATION = "ratio/advantage_correlation_window"
DEVIATION = "correct/ratio_deviation"
CLIPPED_TOKENS = "correct/clip_fraction_tokens"
GROUPS = "group_share"
PEARSON = "Pearson r"
LEAST_SPAN = 20
"""Percentage points that an axis spans at least: less would draw noise as a rise or a fall."""
MOST_BANDS = 3
"""With more arms in a panel, bands hide each other: lines alone."""
SMALL = 0.02
"""Stages below this share of every bar are drawn as part of `other`."""
WAIT = "wait"
TRAINING, GENERATION = SIDES = ("training", "generation")
"""Ranks of a run with generation ranks; other runs have one side, named ""."""
_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")


# -- over training ---------------------------------------------------------------------------------


def over_training(comparison: Comparison) -> Exhibit:
    """Held-out pass@1 and pass@k, training reward and correlation."""
    window = window_of(comparison.runs)
    quantities: dict[str, Callable[[Run], Values]] = {
        f"{key.removeprefix('eval/')} (%)": partial(Run.series, key=key)
        for key in pass_keys(comparison.arms)
    }
    quantities["correct in training (%)"] = partial(_smoothed, window=window)
    quantities[PEARSON] = partial(Run.series, key=CORRELATION)
    rows, figure = _draw_quantities(comparison, quantities)
    if figure is None:
        raise NoData("no run has evaluations or a window of steps")
    seeds = ", ".join(f"{arm.label} {len(arm.runs)}" for arm in comparison.arms)
    return Exhibit(
        aid="Accuracy on held-out problems (pass@1: one answer is correct; pass@k: at least one of "
        "k is), correct rollouts in training, and the correlation of mean ratio deviation and mean "
        "advantage of correct rollouts over c.",
        rows=rows,
        figure=figure,
        notes=[
            f"Means over seeds ({seeds}). Bands, drawn for up to {MOST_BANDS} methods and always "
            "in the CSV: 95 % Student-t intervals, cut off where values are impossible; of r of a "
            "single seed, a bootstrap over the window's steps.",
            f"Correct in training: means over rollouts{_point(window)}. Pearson's r: over the last "
            f"{WINDOW} steps, before step {WINDOW - 1} over all so far.",
        ],
    )


def health(comparison: Comparison) -> Exhibit:
    """Response length, gradient norm, mismatch with the engine and unknown verdicts."""
    window = window_of(comparison.runs)
    keys = {
        "response tokens": "rollout/response_length/mean",
        "gradient norm": "optim/grad_norm",
        "mismatch (nats)": "mismatch/mean_abs_log_prob_diff",
        "unknown (%)": "reward/unknown_share",
    }
    rows, figure = _draw_quantities(
        comparison,
        {title: partial(_smoothed, key=key, window=window) for title, key in keys.items()},
    )
    if figure is None:
        raise NoData(f"no run has {window} steps with {', '.join(keys.values())}")
    return Exhibit(
        aid="Mean length of the responses, norm of the gradient before clipping, mean difference "
        "of the trainer's and the engine's log-probs, and responses that could not be judged.",
        rows=rows,
        figure=figure,
        notes=[f"Means over seeds{_point(window)}."],
    )


def _draw_quantities(
    comparison: Comparison, quantities: Mapping[str, Callable[[Run], Values]]
) -> tuple[list[Row], Figure | None]:
    """Draw a panel per quantity that a run has, a line per arm; no figure without any."""
    rows: list[Row] = []
    for quantity, values in quantities.items():
        found = curve_rows(comparison.arms, values, quantity=quantity)
        rows += _bootstrapped(comparison, found) if quantity == PEARSON else found
    drawn = distinct(rows, "quantity")
    if not drawn:
        return rows, None
    figure, axes = panels(len(drawn), share_y=False)
    for axis, quantity in zip(axes, drawn, strict=True):
        limits, scale = (0.0, math.inf), 1
        if quantity.endswith("(%)"):
            limits, scale = (0.0, 1.0), 100
        elif quantity == PEARSON:
            limits = (-1.0, 1.0)
        over_steps(axis, ylabel=quantity)
        for place, arm in enumerate(comparison.arms):
            if not (line := select(rows, quantity=quantity, arm=arm.label)):
                continue
            if len(comparison.arms) > MOST_BANDS:
                line = [row | {"low": None, "high": None} for row in line]
            look = {"label": arm.label, **arm_style(place)}
            draw_band(axis, line, limits=limits, scale=scale, **look)
        if quantity == PEARSON:
            axis.set_ylim(-1.05, 1.05)
        elif scale == 100:
            widen(axis, least=LEAST_SPAN, limits=(0, 100))
        else:
            axis.set_ylim(bottom=0)
    outer_names(axes, share_y=False)
    legend_below(figure, *axes)
    return rows, figure


def _bootstrapped(comparison: Comparison, rows: Sequence[Row]) -> list[Row]:
    """Rows of the windowed correlation, with bounds for arms of a single seed, too."""
    found = []
    for arm in comparison.arms:
        own = select(rows, arm=arm.label)
        if len(arm.runs) == 1:
            bounds = window_bounds(arm.runs[0], [row["step"] for row in own])
            ends = [bounds.get(row["step"], (None, None)) for row in own]
            own = [
                row | {"low": one[0], "high": one[1]} for row, one in zip(own, ends, strict=True)
            ]
        found += own
    return found


def _smoothed(run: Run, *, key: str = "reward/mean", window: int) -> Values:
    values = run.series(key)
    return windowed(values, list(values), window)


def _point(window: int) -> str:
    return f" and, at each point, over the {window} steps up to it" * (window > 1)


# -- curves per c ----------------------------------------------------------------------------------


def deviation_per_c(comparison: Comparison) -> Exhibit:
    """The paper's figure 1: mean deviation of the ratio from 1."""
    return draw_per_c(
        comparison,
        DEVIATION,
        ylabel="mean s - 1 (%)",
        aid="Mean of s - 1 over correct rollouts; s is the ratio of the new to the old "
        "probability, of a sequence or of a token, whichever the method clips. Above 0 the updates "
        "of a step raised the probability of these rollouts, below 0 they lowered it.",
    )


def clip_fraction_per_c(comparison: Comparison) -> Exhibit:
    """The paper's figure 3: share of the tokens of correct rollouts that are clipped."""
    return draw_per_c(
        comparison,
        CLIPPED_TOKENS,
        ylabel="tokens clipped (%)",
        aid="Share of the tokens of correct rollouts that are clipped; where a method clips the "
        "ratio of a sequence, all tokens of a clipped rollout.",
    )


def groups_per_c(comparison: Comparison) -> Exhibit:
    """Share of the groups with c correct rollouts."""
    return draw_per_c(
        comparison,
        GROUPS,
        ylabel="groups (%)",
        aid="Share of the groups with c correct rollouts, from c = 0 below to c = k above. There, "
        "hatched, all rollouts have the same reward: their advantage is 0.",
    )


def draw_per_c(comparison: Comparison, name: str, *, ylabel: str, aid: str) -> Exhibit:
    """Smoothed curves of `per_c/{name}` in percent: a panel per arm, a curve per c."""
    window = window_of(comparison.runs)
    rows: list[Row] = []
    for c in sorted({c for run in comparison.runs for c in per_c(run, name)}):

        def smooth(run: Run, c: int = c) -> Values:
            values, weights = per_c(run, name).get(c, ({}, {}))
            return windowed(values, list(run.series("reward/mean")), window, weights=weights)

        rows += curve_rows(comparison.arms, smooth, c=c)
    if not rows:
        raise NoData(f"no run has per_c/{name} over {window} steps")
    drawn = [arm for arm in comparison.arms if select(rows, arm=arm.label)]
    # Token ratios deviate far more than sequence ratios.
    share_y = name != DEVIATION or len({arm.method.ratio for arm in drawn}) == 1
    figure, axes = panels(len(drawn), share_y=share_y)
    for axis, arm in zip(axes, drawn, strict=True):
        over_steps(axis, ylabel=ylabel)
        axis.set_title(wrapped(arm.label))
        draw = _draw_layers if name == GROUPS else _draw_curves
        draw(axis, select(rows, arm=arm.label), arm)
    outer_names(axes, share_y=share_y)
    most = max(range(len(drawn)), key=lambda place: drawn[place].k)
    legend_below(figure, axes[most], title="c (correct of a group)", handle_length=1.9)
    return Exhibit(
        aid=f"{aid} c is the number of correct rollouts in the group: dark for small c, light for "
        "large c.",
        rows=rows,
        figure=figure,
        notes=[f"Means over seeds{_point(window)}. The CSV has the intervals over seeds."],
    )


def _draw_curves(axis: Axes, rows: Sequence[Row], arm: Arm) -> None:
    for c in sorted({row["c"] for row in rows}):
        line = select(rows, c=c)
        look = {"color": c_colour(c, arm.k), "linestyle": LINE_STYLES[c % len(LINE_STYLES)]}
        axis.plot(column(line, "step"), 100 * column(line, "mean"), label=str(c), **look)


def _draw_layers(axis: Axes, rows: Sequence[Row], arm: Arm) -> None:
    layers = [select(rows, c=c) for c in range(arm.k + 1)]
    drawn = axis.stackplot(
        column(layers[0], "step"),
        [100 * column(layer, "mean") for layer in layers],
        labels=[str(c) for c in range(arm.k + 1)],
        colors=[c_colour(c, arm.k) for c in range(arm.k + 1)],
        linewidth=0.3,
        edgecolor="white",
    )
    for layer in (drawn[0], drawn[-1]):
        layer.set_hatch("////")
    axis.set_ylim(0, 100)
    axis.margins(x=0)


# -- time of a step --------------------------------------------------------------------------------


def step_time(comparison: Comparison) -> Exhibit:
    """Seconds of a step by stage: a bar per arm; with generation ranks, a bar per side."""
    rows = [row for arm in comparison.arms for row in time_rows(arm)]
    if not rows:
        raise NoData("no run has timings")
    labels = list(dict.fromkeys(map(_bar, rows)))
    num_lines = max(1 + wrapped(label).count("\n") for label in labels)
    figure, (axis,) = panels(1, row_inches=0.55 + (0.05 + 0.13 * num_lines) * max(2, len(labels)))
    _draw_time(axis, rows)
    axis.set_yticks(range(len(labels)), [wrapped(label) for label in labels])
    legend_below(figure, axis, handle_length=1.4)
    notes = [
        f"Means over steps and seeds. `other` is the time between stages, and the stages that take "
        f"less than {100 * SMALL:.0f} % of every bar. Runs on one machine at the same time slow "
        "each other down."
    ]
    if waits := select(rows, stage=WAIT):
        notes += [
            "A method with generation ranks has a bar for the ranks that train and one for those "
            "that generate. `wait` is the time that one side waits for the other: training ranks "
            "for a batch, or for the end of generation before a weight sync; generation ranks for "
            "their next orders.",
            *(f"{_bar(row)} waits {row['share']:.0%} of a step." for row in waits if row["side"]),
        ]
    return Exhibit(
        aid="Mean wall-clock seconds of a training step, split by stage.",
        rows=rows,
        figure=figure,
        notes=notes,
    )


def time_rows(arm: Arm) -> list[Row]:
    """Rows of arm, side, stage, seconds, share: means over all steps of all seeds.

    With generation ranks, shares are of the side's own step. Where training's sync takes longer
    than generation's, it has waited for generation: the difference counts as `wait`.
    """
    steps = [row for run in arm.runs for row in run.timings if "time/step_s" in row]
    apart = [row for row in steps if "generation/step_s" in row]
    if not steps:
        return []
    training = _mean_seconds(apart or steps, "time")
    if not apart:
        return _stage_rows(arm, "", training)
    generation = _mean_seconds(apart, "generation")
    held_s = max(0.0, training.get("sync", 0.0) - generation.get("sync", 0.0))
    training = {WAIT: 0.0, "sync": 0.0} | training
    training[WAIT] += held_s
    training["sync"] -= held_s
    return [
        *_stage_rows(arm, TRAINING, training),
        *_stage_rows(arm, GENERATION, {WAIT: 0.0} | generation),
    ]


def _mean_seconds(steps: Sequence[Mapping[str, float]], section: str) -> dict[str, float]:
    """Mean of `section/<stage>_s` by stage, `step` (the whole of it) included."""
    totals: dict[str, float] = {}
    for row in steps:
        for key, seconds in row.items():
            match = re.fullmatch(rf"{section}/(\w+)_s", key)
            if match and match[1] != "unix":  # the time of day
                totals[match[1]] = totals.get(match[1], 0.0) + seconds
    return {stage: total / len(steps) for stage, total in totals.items()}


def _stage_rows(arm: Arm, side: str, seconds: Mapping[str, float]) -> list[Row]:
    whole = seconds["step"]
    stages = {stage: value for stage, value in seconds.items() if stage != "step"}
    stages["other"] = max(whole - sum(stages.values()), 0.0)
    rows: list[Row] = []
    for stage, value in stages.items():
        row: Row = {"arm": arm.label, "side": side, "stage": stage, "seconds": value}
        rows.append(row | {"share": value / whole if whole else 0.0})
    return rows


def _draw_time(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw one bar per arm (or per side of it), cut into stages."""
    labels = list(dict.fromkeys(map(_bar, rows)))
    seconds = {(_bar(row), row["stage"]): row["seconds"] for row in rows}
    large = [
        stage
        for stage in distinct(rows, "stage")
        if stage != "other" and any(row["share"] >= SMALL for row in select(rows, stage=stage))
    ]
    left = np.zeros(len(labels))
    whole = np.array(
        [sum(v for (bar, _), v in seconds.items() if bar == label) for label in labels]
    )
    for place, stage in enumerate([*large, "other"]):
        width = np.array([seconds.get((label, stage), 0.0) for label in labels])
        if stage == "other":  # with the small stages
            width = whole - left
        look = {"label": stage.replace("_", " "), **_stage_look(stage, place)}
        axis.barh(labels, width, left=left, height=0.65, linewidth=0.4, **look)
        left = left + width
    axis.set(xlabel="seconds per step", ylabel="method")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


def _bar(row: Row) -> str:
    """Label of the bar that a row is part of."""
    return f"{row['arm']}, {row['side']}" if row["side"] else str(row["arm"])


def _stage_look(stage: str, place: int) -> dict[str, Any]:
    """Colour and hatch of a stage: waiting is empty, `other` is grey."""
    if stage == WAIT:
        return {"color": "white", "hatch": "//////", "edgecolor": "0.6"}
    return {
        "color": "0.8" if stage == "other" else COLOURS[place % len(COLOURS)],
        "hatch": _HATCHES[place % len(_HATCHES)],
        "edgecolor": "white",
    }
