"""What a part has to say: figures, claims that must hold, and goals. The standard library alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gapo_megatron.io.files import write_atomically


@dataclass(frozen=True)
class Row:
    """One line of a part's table."""

    what: str
    value: Any
    unit: str = ""
    kind: Literal["figure", "claim", "goal"] = "figure"
    rule: str = ""
    """What a claim or a goal says of the value."""
    holds: bool = True

    def __str__(self) -> str:
        shown = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        text = f"{shown} {self.unit}".strip()
        if self.kind == "figure":
            return text
        said = {"claim": ("holds", "DOES NOT HOLD"), "goal": ("met", "not met")}[self.kind]
        return f"{text} ({self.rule}: {said[not self.holds]})"


@dataclass
class Report:
    """Filled by a part; all rows so far are in the file `path`, if there is one."""

    rows: list[Row] = field(default_factory=list)
    path: Path | None = None

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        if self.path is not None:
            write_atomically(self.path, json.dumps([asdict(one) for one in self.rows]))

    def figure(self, what: str, value: Any, unit: str = "") -> None:
        """Something measured."""
        self._add(Row(what, value, unit))

    def claim(self, what: str, value: Any, rule: str, *, holds: bool, unit: str = "") -> None:
        """Something that must hold: else the part fails."""
        self._add(Row(what, value, unit, "claim", rule, holds))

    def goal(self, what: str, value: float, unit: str, *, at_least: float) -> None:
        """Something aimed at; a part may miss it."""
        holds = math.isfinite(value) and value >= at_least
        self._add(Row(what, value, unit, "goal", f"at least {at_least:g}", holds))

    @property
    def holds(self) -> bool:
        """Every claim."""
        return all(row.holds for row in self.rows if row.kind == "claim")


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one line a row, the parts in their order."""
    lines = ["| part | what | found |", "| --- | --- | --- |"]
    for result in results:
        seconds = f", {result['seconds']:.0f} s" if "seconds" in result else ""
        why = f": {result['why']}" if result.get("why") else ""
        lines.append(f"| **{result['part']}** | {result['status']}{seconds}{why} | |")
        lines += [f"| | {row.what} | {row} |" for row in rows_of(result)]
    return "\n".join(line.replace("\n", " ") for line in lines) + "\n"


def rows_of(result: Mapping[str, Any]) -> Iterable[Row]:
    """What a part has found, perhaps cut off."""
    return (Row(**row) for row in result.get("rows", ()))
