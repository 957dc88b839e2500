"""The look of figures, and the files of one: a paper's column wide, readable without colour."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gapo_tools.evaluation.table import Table
from gapo_tools.reporting.series import Row

COLUMN_INCHES = 3.3
COLUMN_LETTERS = 60
"""Letters of `MIN_POINTS` in a line of a column."""
NUM_COLUMNS = 2
"""Panels in a row of a figure."""
MIN_POINTS = 7.0
"""Font size, in points at the printed size."""
DPI = 300

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette for all kinds of colour vision, without its yellow (too light here)."""
LINE_STYLES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_SETTINGS = {
    "font.size": MIN_POINTS,
    "axes.labelsize": MIN_POINTS,
    "axes.titlesize": MIN_POINTS + 0.5,
    "xtick.labelsize": MIN_POINTS,
    "ytick.labelsize": MIN_POINTS,
    "legend.fontsize": MIN_POINTS,
    "legend.frameon": False,
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
    "text.parse_math": False,  # labels may have settings, such as a system prompt with $\boxed{}$
}
_METADATA = {"png": {}, "pdf": {"CreationDate": None}}
"""Metadata by kind of file: no dates, so that the same figure is the same file."""
KINDS = (".csv", *(f".{kind}" for kind in _METADATA))
"""Endings of the files that `Exhibit.write` writes."""


@dataclass(frozen=True)
class Exhibit:
    """One figure or table of a report."""

    aid: str
    """What the figure or table shows, for its caption."""
    rows: list[Row]
    """All data drawn; every row has the same keys."""
    figure: Figure | None = None
    table: Table | None = None
    notes: list[str] = field(default_factory=list)

    def write(self, stem: Path) -> list[Path]:
        """Write the data (CSV) and the figure (PNG, PDF); inside `style`.

        Returns:
            The files: `stem` with their endings.
        """
        paths = [stem.with_suffix(".csv")]
        with paths[0].open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(self.rows[0]))  # None: an empty field
            writer.writeheader()
            writer.writerows(self.rows)
        if self.figure is not None:
            for kind, metadata in _METADATA.items():
                paths.append(stem.with_suffix(f".{kind}"))
                self.figure.savefig(paths[-1], dpi=DPI, metadata=metadata)
        return paths


@contextmanager
def style() -> Iterator[None]:
    """Apply the settings of all figures; draw and save inside."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def panels(
    number: int, *, row_inches: float = 1.45, share_y: bool = True
) -> tuple[Figure, list[Axes]]:
    """Make a column-wide figure of `number` panels, `NUM_COLUMNS` in a row, that share x."""
    num_columns = min(number, NUM_COLUMNS)
    num_rows = -(-number // num_columns)
    figure = Figure(figsize=(COLUMN_INCHES, row_inches * num_rows))
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=share_y)
    axes = list(grid.flat)
    for axis in axes[number:]:
        axis.remove()
    return figure, axes[:number]


def outer_names(axes: Sequence[Axes], *, share_y: bool = True) -> None:
    """Keep x labels and ticks in the lowest panels only and, with a shared y, y's in the left."""
    for place, axis in enumerate(axes):
        is_lowest = place + NUM_COLUMNS >= len(axes)
        axis.tick_params(labelbottom=is_lowest)
        if not is_lowest:
            axis.set_xlabel("")
        if share_y and place % NUM_COLUMNS:
            axis.tick_params(labelleft=False)
            axis.set_ylabel("")


def over_steps(axis: Axes, *, ylabel: str) -> None:
    """Label the axes of a panel over training steps, with whole steps as ticks."""
    axis.set(xlabel="step", ylabel=ylabel)
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def widen(axis: Axes, *, least: float, limits: tuple[float, float]) -> None:
    """Let the y axis span at least `least`, around what is drawn and within `limits`."""
    low, high = axis.get_ylim()
    if (missing := least - (high - low)) > 0:
        low, high = low - missing / 2, high + missing / 2
    # Beyond a limit there are no values: the span moves inside.
    shift = max(limits[0] - low, 0) - max(high - limits[1], 0)
    axis.set_ylim(max(low + shift, limits[0]), min(high + shift, limits[1]))


def arm_style(place: int) -> dict[str, Any]:
    """Colour, line style and marker of a panel's line number `place`; the first 28 all differ."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": LINE_STYLES[place % len(LINE_STYLES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def c_colour(c: int, k: int) -> Any:
    """Colour of c: dark for 0 to light for k, in greyscale too."""
    return colormaps["viridis"](0.9 * c / k)


def column(rows: Sequence[Row], key: str) -> np.ndarray:
    """Values of one key, [rows] float64; NaN for None."""
    return np.array([np.nan if row[key] is None else row[key] for row in rows], dtype=np.float64)


def draw_band(
    axis: Axes,
    rows: Sequence[Row],
    *,
    label: str,
    limits: tuple[float, float],
    scale: float,
    **look: Any,
) -> None:
    """Draw the mean over step as a line and, for several seeds, its interval as a band.

    Args:
        axis: the panel.
        rows: rows with step, mean, low, high.
        label: label in the legend.
        limits: smallest and largest possible value; intervals are cut off there.
        scale: factor for all values.
        look: see `arm_style`.
    """
    steps = column(rows, "step")
    every = max(1, len(rows) // 8)
    axis.plot(steps, scale * column(rows, "mean"), label=label, markevery=every, **look)
    low, high = (scale * np.clip(column(rows, key), *limits) for key in ("low", "high"))
    if not np.isnan(low).all():
        axis.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)


def wrapped(label: str) -> str:
    """Wrap a panel's title to half a column."""
    return textwrap.fill(label, 22, break_long_words=False)


def legend_below(figure: Figure, *axes: Axes, title: str = "", handle_length: float = 2.4) -> None:
    """Put one legend for all panels below them; the figure grows by its height.

    Args:
        figure: holds `axes`.
        axes: panels with the entries; of entries with the same label the first is shown.
        title: title of the legend.
        handle_length: length of lines and patches, in letters.
    """
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    widest = max(len(line) for label in entries for line in label.splitlines())
    fitting = int(COLUMN_LETTERS / (widest + 2 * handle_length + 3))
    num_columns = max(1, min(fitting, len(entries)))
    tallest = max(1 + label.count("\n") for label in entries)
    num_lines = -(-len(entries) // num_columns) * tallest + (title != "")
    figure.set_figheight(figure.get_figheight() + 1.45 * num_lines * MIN_POINTS / 72 + 0.05)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=num_columns,
        columnspacing=1.0,
        handletextpad=0.5,
        handlelength=handle_length,
        title=title or None,
        title_fontsize=MIN_POINTS,
    )
