"""Exhibits of a report: a figure or a table, its data, and how to read it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from gapo_megatron.evaluate.table import Table
from gapo_megatron.io.documents import open_file
from gapo_megatron.io.files import naming
from gapo_megatron.ops.report.arms import Comparison
from gapo_megatron.ops.report.series import Row

DPI = 300
_METADATA = {"png": {}, "pdf": {"CreationDate": None}}
"""Metadata by kind of file: no dates, so that the same figure is the same file."""


@dataclass(frozen=True)
class Exhibit:
    """One figure or table."""

    aid: str
    """Reading aid: one sentence."""
    rows: list[Row]
    """All that is drawn; every row has the same keys."""
    figure: Figure | None = None
    table: Table | None = None
    notes: list[str] = field(default_factory=list)

    def write(self, stem: Path) -> list[Path]:
        """Write data (CSV), figure (PNG, PDF) and table (LaTeX); inside `style`.

        Returns:
            The files, `stem` with their endings.
        """
        paths = [stem.with_suffix(".csv")]
        write_csv(paths[0], self.rows)
        if self.figure is not None:
            for kind, metadata in _METADATA.items():
                paths.append(stem.with_suffix(f".{kind}"))
                self.figure.savefig(paths[-1], dpi=DPI, metadata=metadata)
        if self.table is not None:
            paths.append(stem.with_suffix(".tex"))
            paths[-1].write_text(self.table.to_latex(), encoding="utf-8")
        return paths


KINDS = (".csv", *(f".{kind}" for kind in _METADATA), ".tex")
"""Endings of what `Exhibit.write` writes."""
Maker = Callable[[Comparison], Exhibit]
"""Makes an exhibit, or raises NoData with the reason."""


def csv_names(path: Path) -> set[str]:
    """The names in the first line of a CSV file, whoever wrote it; none where there is no file."""
    with naming(path):
        try:
            with open_file(path) as file:
                return set(file.readline(2**16).decode(errors="replace").strip().split(","))
        except FileNotFoundError:
            return set()


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line of names, then the rows; an empty field is None."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
