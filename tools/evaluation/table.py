"""Tables as text for terminal and Markdown, and formats of their cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gapo_tools.evaluation.statistics import has_spread, mean_interval

NONE = "-"
"""Cell of a missing figure."""


@dataclass(frozen=True, slots=True)
class Table:
    """Text in rows and columns; the first column has the names of the rows."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()
    """(row, column) of bold cells."""
    notes: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        """The table as text for a terminal."""
        lines = ["  ".join(row).rstrip() for row in _aligned([self.columns, *self.rows])]
        rule = "-" * max(map(len, lines))
        return "\n".join([self.title, rule, lines[0], rule, *lines[1:], rule, *self.notes, ""])

    def to_markdown(self) -> str:
        rows = [
            [
                f"**{_markdown(cell)}**" if (number, place) in self.best else _markdown(cell)
                for place, cell in enumerate(row)
            ]
            for number, row in enumerate(self.rows)
        ]
        head, *body = _aligned([self.columns, *rows])
        rule = ["-" * len(head[0]), *("-" * (len(cell) - 1) + ":" for cell in head[1:])]
        lines = [f"**{_markdown(self.title)}**", ""]
        lines += [f"| {' | '.join(row)} |" for row in [head, rule, *body]]
        return "\n".join([*lines, "", *(f"{_markdown(note)}\n" for note in self.notes)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Pad cells to the width of their column: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def _markdown(text: str) -> str:
    return text.replace("*", "\\*").replace("|", "\\|")


def percent(value: float, *, digits: int = 1) -> str:
    """Format a share in %; `NONE` for NaN."""
    return NONE if math.isnan(value) else f"{100 * value:.{digits}f}"


def mean(values: Sequence[float]) -> float:
    """Mean; NaN without values or if one is NaN."""
    return math.fsum(values) / len(values) if values else math.nan


def with_interval(values: Sequence[float], *, digits: int = 2) -> str:
    """Format mean and half width of the 95 % Student-t interval in %; equal values: the mean."""
    if not has_spread(values) or math.isnan(mean(values)):
        return percent(mean(values), digits=digits)
    interval = mean_interval(values)
    half = (interval.high - interval.low) / 2
    return f"{percent(interval.mean, digits=digits)}±{percent(half, digits=digits)}"
