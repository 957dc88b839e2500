"""A run at a glance: one picture of six panels."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gapo_megatron.ops.report.arms import Comparison
from gapo_megatron.ops.report.clipping import (
    CLIPPED,
    DEVIATION,
    correlation_rows,
    draw_correlation,
    draw_per_c,
    per_c_rows,
)
from gapo_megatron.ops.report.costs import draw_time, time_rows
from gapo_megatron.ops.report.learning import (
    SHARE_LIMITS,
    Shown,
    draw_arms,
    draw_pass,
    pass_rows,
    reward_rows,
)
from gapo_megatron.ops.report.runs import find_trained, read_run
from gapo_megatron.ops.report.series import NoData, distinct
from gapo_megatron.ops.report.style import COLUMN_INCHES, DPI, mark_changes, style

_TITLE_LETTERS = 50
_LEGEND_LETTERS = 30
_BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.2),
    "columnspacing": 1.0,
    "handlelength": 1.9,
}
"""Place of the legend of a panel full of lines."""


def write_picture(folders: Sequence[Path], output: Path) -> Path:
    """Draw runs at a glance; a panel that they cannot fill says why.

    Panels: reward, held-out accuracy, time; clip fraction and deviation per c of the first method,
    correlation.

    Args:
        folders: see `write_report`.
        output: PNG file to write; its folder is made when missing.

    Returns:
        `output`.

    Raises:
        DataError, ConfigError: as `write_report`.
    """
    comparison = Comparison.of([read_run(folder) for folder in find_trained(folders)[0]])
    with style():
        figure = draw_picture(comparison)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=DPI // 2)
    return output


def draw_picture(comparison: Comparison) -> Figure:
    """Draw the figure; inside `style`."""
    figure = Figure(figsize=(3 * COLUMN_INCHES, 1.7 * COLUMN_INCHES))
    panels: dict[str, Callable[[Axes, Comparison], None]] = {
        "Training reward": _reward,
        "Held-out problems": _held_out,
        "Time": _time,
        "Correct rollouts: clip fraction": lambda axis, of: _per_c(axis, of, CLIPPED),
        "Correct rollouts: ratio deviation": lambda axis, of: _per_c(axis, of, DEVIATION),
        "Correlation of ratio deviation and advantage": _correlation,
    }
    for axis, (title, draw) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        axis.set_title(title)
        try:
            draw(axis, comparison)
        except NoData as reason:
            axis.set(xticks=[], yticks=[])
            axis.text(0.5, 0.5, str(reason), ha="center", wrap=True, transform=axis.transAxes)
        if axis.get_xlabel() == "step":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    mark_changes(figure, comparison.changes)
    return figure


def _reward(axis: Axes, comparison: Comparison) -> None:
    rows, window = reward_rows(comparison.curves)
    axis.set_ylabel("correct (%)")
    draw_arms(axis, rows, _shown(comparison), limits=SHARE_LIMITS, scale=100)
    axis.set_title(f"Training reward{_over(window)}")
    axis.legend()


def _held_out(axis: Axes, comparison: Comparison) -> None:
    """Draw a line per metric and arm; those of the first metric look as in the other panels."""
    rows = pass_rows(comparison.curves)
    for place, metric in enumerate(distinct(rows, "metric")):
        first = place * len(comparison.curves)
        draw_pass(axis, rows, _shown(comparison), metric, first_place=first, name=metric)
    axis.set(ylabel="problems solved (%)", ylim=(0, 102))
    axis.legend()


def _time(axis: Axes, comparison: Comparison) -> None:
    rows = [row for arm in comparison.curves for row in time_rows(arm)]
    if not rows:
        raise NoData("no run has timings")
    draw_time(axis, rows)
    hours = sum(run.hours for arm in comparison.curves for run in arm.runs)
    axis.set_title(f"Time of a step ({60 * hours:.1f} minutes in all)")
    names = [textwrap.fill(label.get_text(), 20) for label in axis.get_yticklabels()]
    axis.set_yticks(axis.get_yticks(), names)
    axis.legend(ncols=3, **_BELOW)


def _per_c(axis: Axes, comparison: Comparison, name: str) -> None:
    arm = comparison.curves[0]
    rows, window = per_c_rows([arm], name)
    draw_per_c(axis, rows, arm, name)
    title = f"{axis.get_title()}{_over(window)}"
    axis.set_title(f"{title}\n{textwrap.fill(arm.label, _TITLE_LETTERS)}")
    axis.legend(title="c (correct of a group)", ncols=4, **_BELOW)


def _correlation(axis: Axes, comparison: Comparison) -> None:
    draw_correlation(axis, correlation_rows(comparison.curves), _shown(comparison))
    axis.legend()


def _over(window: int) -> str:
    return f", mean over {window} steps" if window > 1 else ""


def _shown(comparison: Comparison) -> Shown:
    """Arms of the curves by their names, wrapped for a legend inside a panel."""
    return {textwrap.fill(arm.label, _LEGEND_LETTERS): arm for arm in comparison.curves}
