"""The clip by c: its widths, and what it clipped."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gapo_megatron.objective import upper_clip
from gapo_tools.reporting.arms import Arm, Comparison
from gapo_tools.reporting.runs import Run
from gapo_tools.reporting.series import NoData, Row, interval, per_c, select, windowed
from gapo_tools.reporting.style import (
    Exhibit,
    arm_style,
    column,
    legend_below,
    panels,
)

CLIPPED = "correct/clip_fraction_sequences"


def clip_by_c(comparison: Comparison) -> Exhibit:
    """Upper clip width by c, beside the share of correct rollouts that it clipped."""
    rows = [row for arm in comparison.arms for row in _rows(arm)]
    if not rows:
        raise NoData(f"no run has per_c/{CLIPPED}")
    figure, axes = panels(2, share_y=False)
    for place, arm in enumerate(comparison.arms):
        look = {"label": arm.label, **arm_style(place)}
        for axis, key in zip(axes, ("upper", "mean"), strict=True):
            line = select(rows, arm=arm.label)
            axis.plot(column(line, "c"), 100 * column(line, key), **look)
    _name(axes[0], "upper width (%)", [row["upper"] for row in rows])
    _name(axes[1], "responses clipped (%)", [])
    legend_below(figure, *axes)
    return Exhibit(
        aid="Left: how far the ratio of a correct rollout may rise above 1 before it is clipped. "
        "Right: correct rollouts that were clipped, over all steps. c is the number of correct "
        "rollouts in the group; at c = k the advantage is 0.",
        rows=rows,
        figure=figure,
        notes=[
            "Means over seeds; the CSV has the intervals. Methods that find their bounds in "
            "each mini-batch have no line on the left."
        ],
    )


def _rows(arm: Arm) -> list[Row]:
    """Rows of arm, c, upper (None: no fixed width), mean, low, high, seeds."""
    shares = [_shares(run) for run in arm.runs]
    found = sorted(set.intersection(*map(set, shares)))
    return [
        {"arm": arm.label, "c": c, "upper": _upper(arm, c)} | interval([one[c] for one in shares])
        for c in found
        if 0 < c < arm.k
    ]


def _shares(run: Run) -> dict[int, float]:
    """Share of a run's correct rollouts that were clipped, by c."""
    found = {}
    for c, (values, weights) in per_c(run, CLIPPED).items():
        steps = list(run.series("reward/mean"))
        for share in windowed(values, steps, len(steps), weights=weights).values():
            found[c] = share
    return found


def _upper(arm: Arm, c: int) -> float | None:
    method = arm.method
    if not method.has_width_by_c:
        return None
    if not method.adaptive:
        return method.eps_high_max
    width = upper_clip(
        torch.tensor(c), group_size=arm.k, eps_low=method.floor, eps_high_max=method.eps_high_max
    )
    return float(width)


def _name(axis: Axes, ylabel: str, widths: list[float | None]) -> None:
    axis.set(xlabel="c (correct of a group)", ylabel=ylabel)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    known = [one for one in widths if one]
    if known and max(known) > 10 * min(known):  # widths of token ratios beside those of sequences
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")  # no formula: see `style`
        axis.yaxis.set_minor_formatter("")
    else:
        axis.set_ylim(bottom=0)
