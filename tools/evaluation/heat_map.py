"""Heat maps of solve rates by problem, which an average hides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

FONT_SIZE = 9
ROW_INCHES = 0.28
MOST_PERCENT = 98
"""Percentage of cells that a colour scale of differences covers."""
_IMAGE: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}

Rates = Mapping[str, Mapping[str, float]]
"""Row -> problem -> solve rate in 0..1; NaN if no verdict is known."""


def draw_solve_rates(benchmarks: Mapping[str, Rates], output: Path) -> Path:
    """Draw a panel per benchmark: rows are seeds or methods, columns problems, easiest first.

    With more than one row, differences follow below: the first row minus each other one, blue where
    the first solves the problem more often.

    Args:
        benchmarks: title -> rates; all rows of a benchmark have the same problems.
        output: PNG file to write.

    Returns:
        `output`.
    """
    heights = [2 * len(rates) - 1 + 2.6 for rates in benchmarks.values()]
    figure = Figure(figsize=(9, ROW_INCHES * sum(heights) + 0.5), dpi=150, layout="constrained")
    panels = figure.subplots(len(benchmarks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, rates) in zip(panels, benchmarks.items(), strict=True):
        _draw(axes, title, rates)
    figure.savefig(output)
    return output


def difference_limit(values: np.ndarray) -> float:
    """End of the colour scale for differences of solve rates; one cell in 50 is beyond it.

    A scale up to the largest difference would leave most cells pale.

    Args:
        values: differences of any shape, NaN where unknown.

    Returns:
        A multiple of 0.05, at least 0.1.
    """
    known = np.abs(values[~np.isnan(values)])
    size = float(np.percentile(known, MOST_PERCENT)) if known.size else 0.0
    return max(2, math.ceil(round(20 * size, 6))) / 20


def draw_difference(axes: Axes, values: np.ndarray, *, limit: float) -> AxesImage:
    """Draw differences of solve rates, [rows, columns]: blue above 0, red below.

    Differences beyond `limit` have the colour of `limit`; NaN shows the background.
    """
    return axes.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, **_IMAGE)


def _draw(axes: Axes, title: str, rates: Rates) -> None:
    problems = list(next(iter(rates.values())))
    values = np.array([[row[problem] for problem in problems] for row in rates.values()])
    known = np.where(np.isnan(values), 0.0, values)
    values = values[:, np.argsort(-known.mean(axis=0), kind="stable")]
    labels = list(rates)
    rate_image = np.vstack([values, np.full((len(labels) - 1, len(problems)), np.nan)])
    difference_image = np.full_like(rate_image, np.nan)
    difference_image[len(labels) :] = values[:1] - values[1:]
    shown = axes.imshow(rate_image, cmap="viridis", vmin=0, vmax=1, **_IMAGE)
    _scale(axes, shown, "solve rate")
    if len(labels) > 1:
        limit = difference_limit(difference_image)
        shown = draw_difference(axes, difference_image, limit=limit)
        _scale(axes, shown, "difference", extend="both")
        axes.axhline(len(labels) - 0.5, color="black", linewidth=1)
    rows = [*labels, *(f"{labels[0]} - {label}" for label in labels[1:])]
    axes.set_yticks(range(len(rows)), rows, fontsize=FONT_SIZE - 1)
    axes.set_title(title, fontsize=FONT_SIZE, loc="left")
    axes.set_xlabel(f"{len(problems)} problems, easiest first", fontsize=FONT_SIZE - 1)
    axes.tick_params(axis="x", labelsize=FONT_SIZE - 2)
    axes.set_facecolor("0.85")  # no known verdict


def _scale(axes: Axes, shown: ScalarMappable, label: str, *, extend: str = "neither") -> None:
    bar = axes.figure.colorbar(shown, ax=axes, pad=0.01, fraction=0.03, extend=extend)
    bar.set_label(label, fontsize=FONT_SIZE - 2)
    bar.ax.tick_params(labelsize=FONT_SIZE - 3)
