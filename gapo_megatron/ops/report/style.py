"""Style of figures: as wide as a paper's column, told apart without colours too."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from gapo_megatron.ops.report.series import SEED, Row

COLUMN_INCHES = 3.3
NUM_COLUMNS = 2
"""Columns of panels, where there are many."""
MOST_POINTS = 300
"""Points of a line at most."""
MIN_POINTS = 7.0
"""Smallest letters, in points at the printed size."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which differ for every kind of colour vision; their yellow is too light here."""
LINE_STYLES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_OVER_STEPS = "over steps of"
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")

_SETTINGS = {
    "font.size": MIN_POINTS,
    "axes.labelsize": MIN_POINTS,
    "axes.titlesize": MIN_POINTS + 0.5,
    "xtick.labelsize": MIN_POINTS,
    "ytick.labelsize": MIN_POINTS,
    "legend.fontsize": MIN_POINTS,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.borderaxespad": 0.2,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.limits": (-5, 6),  # an exponent would be smaller than 7 points
    "axes.formatter.useoffset": False,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
    "pdf.fonttype": 42,  # text stays text
}


@contextmanager
def style() -> Iterator[None]:
    """The settings of all figures; drawing and saving happen inside."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def panels(
    number: int,
    *,
    num_columns: int = NUM_COLUMNS,
    row_inches: float = 1.45,
    share_y: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A column-wide figure of `number` panels, `num_columns` in a row, with one range of x."""
    num_columns = min(number, num_columns)
    num_rows = -(-number // num_columns)
    figure = Figure(figsize=(COLUMN_INCHES, row_inches * num_rows))
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=share_y)
    axes = list(grid.flat)
    for axis in axes[number:]:
        axis.remove()
    return figure, axes[:number]


def outer_names(
    axes: Sequence[Axes], *, num_columns: int = NUM_COLUMNS, share_y: bool = True
) -> None:
    """Leave names and numbers to the lowest panels of the columns and, of one y, to the left."""
    for place, axis in enumerate(axes):
        is_lowest = place + num_columns >= len(axes)
        axis.tick_params(labelbottom=is_lowest)
        if not is_lowest:
            axis.set_xlabel("")
        if share_y and place % num_columns:
            axis.tick_params(labelleft=False)
            axis.set_ylabel("")


def same_range(axes: Sequence[Axes]) -> None:
    """One range of y for panels that do not share their axis; empty ones decide nothing."""
    ranges = [axis.get_ylim() for axis in axes if axis.has_data()]
    for axis in axes if ranges else ():
        axis.set_ylim(min(low for low, _ in ranges), max(high for _, high in ranges))


def over_steps(axis: Axes, arms: Iterable[str]) -> None:
    """Name x of a panel whose x are steps, and keep whose they are, for `mark_changes`.

    Args:
        axis: the panel; its id says what it shows.
        arms: labels of the arms in it.
    """
    axis.set(xlabel="step", gid="\n".join([_OVER_STEPS, *arms]))


def mark_changes(figure: Figure, changes: Mapping[str, Iterable[int]]) -> set[str]:
    """Draw a line at each change of an arm, in the panels over steps that show the arm.

    Args:
        figure: its panels over steps went through `over_steps`.
        changes: by the arm's label, first steps with other settings.

    Returns:
        The arms whose changes are drawn.
    """
    drawn = set()
    for axis in figure.axes:
        kind, *arms = (axis.get_gid() or "").split("\n")
        shown = changes.keys() & arms if kind == _OVER_STEPS else set()
        for step in {step for arm in shown for step in changes[arm]}:
            axis.axvline(step - 0.5, color="0.3", linewidth=0.8, linestyle="--", zorder=3)
        drawn |= shown
    return drawn


def arm_style(place: int) -> dict[str, Any]:
    """Colour, line style and marker of the line at `place` of a panel; no two of 28 look alike."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": LINE_STYLES[place % len(LINE_STYLES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def c_style(c: int, k: int) -> dict[str, Any]:
    """Dark for scarce correct rollouts, light for abundant ones; line styles in turn."""
    return {"color": c_colour(c, 1, k - 1), "linestyle": LINE_STYLES[(c - 1) % len(LINE_STYLES)]}


def c_colour(c: int, lowest: int, highest: int) -> Any:
    """Colour of c on a scale from dark to light, which also differs without colour."""
    return colormaps["viridis"](0.9 * (c - lowest) / max(highest - lowest, 1))


def column(rows: Sequence[Row], key: str) -> np.ndarray:
    """Values of one key, [rows] float64; NaN for None."""
    return np.array([np.nan if row[key] is None else row[key] for row in rows], dtype=np.float64)


def thinned(rows: Sequence[Row]) -> Sequence[Row]:
    """Every so many rows one, and the last: as many as a column's width shows."""
    every = -(-len(rows) // MOST_POINTS)
    return [*rows[:-1:every], *rows[-1:]] if every > 1 else rows


def draw_band(
    axis: Axes,
    rows: Sequence[Row],
    *,
    label: str,
    limits: tuple[float, float],
    scale: float = 1.0,
    points: bool = False,
    **look: Any,
) -> None:
    """The line of the means over step and, where there are several seeds, their interval.

    Args:
        axis: where to.
        rows: rows with step, mean, low, high; columns `SEED*`, if any, have a seed's values.
        label: label in the legend.
        limits: limits that no value can lie beyond; intervals end there.
        scale: what values are multiplied with.
        points: draw markers, and the seeds as thin lines.
        look: see `arm_style`.
    """
    rows = thinned(rows)
    steps = column(rows, "step")
    for key in (key for key in rows[0] if points and key.startswith(SEED)):
        axis.plot(steps, scale * column(rows, key), color=look["color"], linewidth=0.4, alpha=0.8)
    look |= {"markevery": max(1, len(rows) // 8)} if points else {"marker": ""}
    axis.plot(steps, scale * column(rows, "mean"), label=label, **look)
    low, high = (scale * np.clip(column(rows, key), *limits) for key in ("low", "high"))
    if not np.isnan(low).all():
        axis.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)


def wrapped(label: str) -> str:
    """A panel's title in lines that fit half a column."""
    return textwrap.fill(label, 22, break_long_words=False)


def legend_below(figure: Figure, *axes: Axes, title: str = "", handle_length: float = 2.4) -> None:
    """One legend for all panels under them, in as many columns as fit; the figure grows by it.

    Args:
        figure: holds `axes`.
        axes: have the entries, of one line or several; of those called alike the first is shown.
        title: title of the legend.
        handle_length: length of lines and patches, in letters.
    """
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labels = list(entries)
    em_inches = MIN_POINTS / 72
    every = [line for label in labels for line in label.splitlines()]
    text = max(TextPath((0, 0), line, size=MIN_POINTS).get_extents().width for line in every)
    column_inches = text / 72 + em_inches * (handle_length + 1.5)  # and the gaps around
    num_columns = max(1, min(int(COLUMN_INCHES / column_inches), len(labels)))
    # As matplotlib deals them out.
    columns = np.array_split(labels, num_columns)
    num_lines = max(sum(1 + label.count("\n") for label in some) for some in columns)
    num_lines += title != ""
    figure.set_figheight(figure.get_figheight() + 1.45 * em_inches * num_lines + 0.05)
    figure.legend(
        list(entries.values()),
        labels,
        loc="outside lower center",
        ncols=num_columns,
        columnspacing=1.0,
        handletextpad=0.5,
        handlelength=handle_length,
        title=title or None,
        title_fontsize=MIN_POINTS,
    )
