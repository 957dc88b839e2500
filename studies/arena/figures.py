"""The arena's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from torch import Tensor

from gapo_tools.evaluation.statistics import Interval, mean_interval
from gapo_tools.reporting.series import Row
from gapo_tools.reporting.style import (
    COLOURS,
    COLUMN_INCHES,
    MIN_POINTS,
    Exhibit,
    arm_style,
    column,
    legend_below,
    outer_names,
    panels,
)
from studies.arena import steps
from studies.arena.arms import RATE
from studies.arena.sweep import FEW, Cell
from studies.arena.tables import FIXED, GAPO, UNCLIPPED, Arms, pairs_to_gapo
from studies.arena.train import PASS_AT
from studies.arena.verdicts import (
    AHEAD,
    ALIKE,
    BEHIND,
    MARGINS,
    NOT_RESOLVED,
    OUTCOMES,
    Results,
    compare,
    late,
    shares,
    verdict,
)

SHOWN = (GAPO, "gapo_proportional", FIXED, "gspo", "dapo", "cispo", UNCLIPPED)
"""Rules drawn as lines; the CSV has all."""
SWEPT = FEW[:5]
"""Rules of which the sweep is drawn."""
LOOKS: dict[str, dict[str, Any]] = {
    AHEAD: {"color": COLOURS[0], "marker": ">", "markerfacecolor": COLOURS[0]},
    BEHIND: {"color": COLOURS[1], "marker": "<", "markerfacecolor": COLOURS[1]},
    ALIKE: {"color": COLOURS[2], "marker": "D", "markerfacecolor": "white"},
    NOT_RESOLVED: {"color": "0.35", "marker": "o", "markerfacecolor": "white"},
}
LINE_INCHES = 0.135
"""Height of a line of text."""
WIDE = 3.0
"""Points beyond which differences are drawn on a logarithmic scale."""
LATE = "late"
"""Stands for the mean of the last evaluations, as in the tables."""
BARS: dict[str, Any] = {"capsize": 1.5, "elinewidth": 0.8}


def by_c(arms: Arms, found: Results) -> Exhibit:
    """Clip fraction and |s - 1| of correct responses by c, in the second half of training."""
    rows: list[Row] = []
    for quantity in ("clipped", "|s - 1|"):
        for name, trained in found.items():
            for c in range(1, arms[name].group_size):
                values = shares(trained, quantity, [c])
                if not any(map(math.isnan, values)):
                    point: Row = {"quantity": quantity, "arm": name, "c": c}
                    rows.append({**point, **_bounds(_over(values))})
    figure, axes = panels(2, row_inches=1.7, share_y=False)
    drawn = [name for name in SHOWN if name in found]
    for axis, (quantity, label) in zip(
        axes, {"clipped": "clipped (%)", "|s - 1|": "mean $|s - 1|$ (%)"}.items(), strict=True
    ):
        axis.set(xlabel="c (correct of a group)", ylabel=label)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        for place, name in enumerate(drawn):
            line = [row for row in rows if (row["quantity"], row["arm"]) == (quantity, name)]
            shift = 0.06 * (place - (len(drawn) - 1) / 2)
            _bars(axis, column(line, "c") + shift, line, label=name, **arm_style(place))
    if drawn:
        legend_below(figure, *axes)
    return Exhibit(
        aid="Correct responses in the second half of training: a flat clip fraction treats scarce "
        "(small c) and abundant ones alike. Bars: 95 % intervals over chunks of seeds.",
        rows=rows,
        figure=figure,
    )


def verdicts(arms: Arms, found: Results) -> Exhibit:
    """Forest plot: GAPO minus each rule for the three outcomes, with the margins."""
    pairs = pairs_to_gapo(arms)
    compared = compare(found, pairs)
    order = sorted(compared, key=lambda pair: compared[pair][OUTCOMES[0]].mean)
    rows: list[Row] = []
    for pair in order:
        for outcome, interval in compared[pair].items():
            row: Row = {"rule": pair[1], "outcome": outcome, **_bounds(interval)}
            rows.append({**row, "margin": MARGINS[outcome], "verdict": verdict(interval, outcome)})
    height = 0.65 + LINE_INCHES * max(len(order), 3)
    figure = Figure(figsize=(COLUMN_INCHES, height))
    axes = list(figure.subplots(1, len(OUTCOMES), sharey=True))
    ends = [abs(row[key] or 0) for row in rows for key in ("low", "high")]
    is_wide = max(ends, default=0) > WIDE
    for axis, outcome in zip(axes, OUTCOMES, strict=True):
        if is_wide:
            axis.set_xscale("symlog", linthresh=1.0)
            axis.xaxis.set_major_locator(FixedLocator([-10, -1, 0, 1, 10]))
            axis.xaxis.set_minor_locator(FixedLocator([*range(-9, -1), *range(2, 10)]))
            axis.xaxis.set_major_formatter("{x:g}")
        _forest(axis, [row for row in rows if row["outcome"] == outcome], MARGINS[outcome])
        axis.set_title(_in_lines(outcome))
    beyond = ", logarithmic beyond 1" if is_wide else ""
    axes[len(axes) // 2].set_xlabel(f"GAPO minus rule (points{beyond})")
    if rows:
        legend_below(figure, *axes, handle_length=1.2)
    return Exhibit(
        aid="Right of 0 GAPO is ahead of the rule, left of 0 behind. Shaded: the margin within "
        "which a difference does not matter. Intervals hold together for all rules.",
        rows=rows,
        figure=figure,
    )


def _forest(axis: Axes, rows: Sequence[Row], margin: float) -> None:
    axis.axvspan(-margin, margin, color="0.85", linewidth=0, zorder=0, label="margin")
    axis.axvline(0, color="0.4", linewidth=0.6)
    for word, look in LOOKS.items():
        at = [place for place, row in enumerate(rows) if row["verdict"].startswith(word)]
        if at:
            chosen = [rows[place] for place in at]
            means = column(chosen, "mean")
            error = [means - column(chosen, "low"), column(chosen, "high") - means]
            axis.errorbar(means, at, xerr=error, linestyle="", label=word, **BARS, **look)
    axis.set_yticks(range(len(rows)), [row["rule"] for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)


def frontier(arms: Arms, found: Results) -> Exhibit:
    """Late pass@64 against late pass@1, a point per rule; and the path of some rules."""
    rows: list[Row] = []
    for name, trained in found.items():
        curve = torch.cat([one.curve for one in trained], dim=2)[:, : len(PASS_AT)].mean(dim=2)
        points = [(str(at), 100 * values) for at, values in enumerate(curve)]
        points.append((LATE, late(trained).mean(dim=1)))
        for at, values in points:
            one, many = (float(values[PASS_AT.index(k)]) for k in (1, 64))
            rows.append({"rule": name, "evaluation": at, "pass@1": one, "pass@64": many})
    ends = [row for row in rows if row["evaluation"] == LATE]
    heights = [1.3, max(1.3, LINE_INCHES * len(ends))]
    # Besides the panels, their titles and the names of their axes.
    figure = Figure(figsize=(COLUMN_INCHES, sum(heights) + 1.1))
    ways, last = figure.subplots(2, 1, height_ratios=heights)
    drawn = [name for name in SHOWN if name in found]
    for place, name in enumerate(drawn):
        line = [row for row in rows if row["rule"] == name and row["evaluation"] != LATE]
        ways.plot(column(line, "pass@1"), column(line, "pass@64"), label=name, **arm_style(place))
    for row in ends:
        known = row["rule"] in drawn
        look = arm_style(drawn.index(row["rule"])) if known else {"color": "0.5"}
        look |= {"linestyle": "", "marker": look.get("marker", "."), "markersize": 4}
        last.plot([row["pass@1"]], [row["pass@64"]], **look)
    for axis in (ways, last):
        axis.set(xlabel="pass@1 (%)", ylabel="pass@64 (%)")
    ways.set_title("from the start to the end of training")
    last.set_title("means of the last evaluations")
    _name_at_the_side(last, ends)
    if drawn:
        legend_below(figure, ways)
    return Exhibit(
        aid="Up and to the right is better. Above: the path of some rules during training. Below: "
        "the end of all. Means over seeds; the tables have intervals of the differences.",
        rows=rows,
        figure=figure,
    )


def _name_at_the_side(axis: Axes, rows: Sequence[Row]) -> None:
    """Write names right of the axis, from the highest point to the lowest, with lines to them."""
    axis.margins(0.06)
    order = sorted(rows, key=lambda row: -row["pass@64"])
    for place, row in enumerate(order):
        axis.annotate(
            row["rule"],
            xy=(row["pass@1"], row["pass@64"]),
            xytext=(1.06, 1 - (place + 0.5) / len(order)),
            textcoords="axes fraction",
            fontsize=MIN_POINTS,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.4, "relpos": (0, 0.5)},
        )


def sweeps(swept: Mapping[Cell, Mapping[float, Tensor]]) -> Exhibit:
    """pass@1 and pass@64 of the selection seeds over the width, fresh and stale."""
    rows: list[Row] = []
    for cell, row in swept.items():
        for factor, values in sorted(row.items()):
            means = values.mean(dim=1).tolist()
            point: Row = {**cell._asdict(), "factor": factor}
            rows.append(point | {f"pass@{k}": means[PASS_AT.index(k)] for k in PASS_AT})
    contents = [(mode, f"pass@{k}") for k in PASS_AT for mode in ("fresh", "stale")]
    figure, axes = panels(len(contents), row_inches=1.5, share_y=False)
    for axis, (mode, outcome) in zip(axes, contents, strict=True):
        axis.set(xlabel="factor of the widths", ylabel=f"{outcome} (%)", xscale="log", title=mode)
        for place, name in enumerate(SWEPT):
            wanted = (name, mode, RATE, 8)
            keys = ("rule", "mode", "rate", "group_size")
            line = [row for row in rows if tuple(row[key] for key in keys) == wanted]
            axis.plot(column(line, "factor"), column(line, outcome), label=name, **arm_style(place))
    _log_ticks(axes, sorted({row["factor"] for row in rows}))
    outer_names(axes, share_y=False)
    legend_below(figure, *axes)
    return Exhibit(
        aid=f"Where a curve is highest its width is best. Learning rate {RATE:g}, k = 8; means of "
        "the seeds that choose widths. Factors are of each rule's first width, so they cannot be "
        "compared between rules.",
        rows=rows,
        figure=figure,
    )


def log_ratios(arms: Arms, found: Results) -> Exhibit:
    """Mean log-ratio of correct responses after a step, relative to c = 1, over their advantage."""
    rows: list[Row] = []
    for name, trained in found.items():
        k = arms[name].group_size
        for of_tokens in (False, True):
            means = steps.mean_log_ratio(trained, of_tokens=of_tokens)
            for c in range(1, k):
                row: Row = {"arm": name, "of": "mean token" if of_tokens else "whole response"}
                rows.append(
                    {**row, "advantage": 1 - c / k, "log-ratio": float(means[c] / means[1])}
                )
    figure, axes = panels(2, row_inches=1.7, share_y=False)
    drawn = [name for name in SHOWN if name in found]
    for axis, of in zip(axes, ("whole response", "mean token"), strict=True):
        for first in {1 - 1 / arms[name].group_size for name in found}:  # A at c = 1
            axis.plot([0, first], [0, 1], color="0.6", linewidth=0.8, label="in proportion to A")
        axis.set(xlabel="A of a correct response", ylabel="log-ratio, c = 1 is 1", title=of)
        for place, name in enumerate(drawn):
            line = [row for row in rows if (row["arm"], row["of"]) == (name, of)]
            look = arm_style(place)
            axis.plot(column(line, "advantage"), column(line, "log-ratio"), label=name, **look)
    if drawn:
        legend_below(figure, *axes)
    return Exhibit(
        aid="How far a whole step moves correct responses of groups with few correct ones (right) "
        "and with many (left). A trust region's optimum lies on the grey line.",
        rows=rows,
        figure=figure,
    )


def _in_lines(outcome: str) -> str:
    return outcome.replace(" equal", "\nequal")


def _log_ticks(axes: Sequence[Axes], ticks: Sequence[float]) -> None:
    for axis in axes:
        axis.xaxis.set_major_locator(FixedLocator(list(ticks)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter("{x:g}")


def _bars(axis: Axes, at: np.ndarray, rows: Sequence[Row], *, label: str, **look: Any) -> None:
    means = column(rows, "mean")
    error = [means - column(rows, "low"), column(rows, "high") - means]
    axis.errorbar(at, means, yerr=error, label=label, **BARS, **look)


def _over(values: Sequence[float]) -> Interval | float:
    return mean_interval(values) if len(values) > 1 else values[0]


def _bounds(interval: Interval | float) -> Row:
    """Columns mean, low, high; no bounds for a single value."""
    if isinstance(interval, float):
        return {"mean": interval, "low": None, "high": None}
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}
