"""The folder that preparation writes: problems, dropped rows with reasons, and a manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

PROBLEMS, DROPPED, MANIFEST = "problems.jsonl", "dropped.jsonl", "manifest.json"


@dataclass
class Counts:
    """How many rows were written, and how many each rule dropped."""

    read: int = 0
    written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped rows by rule."""
    levels: dict[str, Counter[str]] = field(default_factory=dict)
    """Rows by level, if rows have one: `written`, or the rule that dropped them."""
    contradictory_texts: int = 0
    """Different problem texts among the contradictory rows."""
    benchmarks: Counter[str] = field(default_factory=Counter)
    """Rows dropped as held out, by benchmark."""

    def add(self, outcome: str, entry: dict[str, Any], details: dict[str, Any]) -> None:
        """Count a row: `outcome` is `written`, or the rule that it broke, with its details."""
        self.read += 1
        if outcome == "written":
            self.written += 1
        else:
            self.dropped[outcome] += 1
        if entry["level"]:
            self.levels.setdefault(entry["level"], Counter())[outcome] += 1
        if outcome == "held_out":
            self.benchmarks[details["same_as"].rpartition("-")[0]] += 1


class Output:
    """Writer of the files in a folder."""

    def __init__(self, problems: BinaryIO, dropped: BinaryIO) -> None:
        self.counts = Counts()
        self._problems = problems
        self._dropped = dropped

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Self]:
        """Open the files; they are complete when the block ends."""
        with ExitStack() as stack:
            yield cls(*(stack.enter_context(open(folder / n, "wb")) for n in (PROBLEMS, DROPPED)))

    def keep(self, entry: dict[str, Any]) -> None:
        """Write a problem."""
        row = {key: entry[key] for key in ("id", "prompt", "answer")}
        self._problems.write(_line(row | ({"level": entry["level"]} if entry["level"] else {})))
        self.counts.add("written", entry, {})

    def drop(self, entry: dict[str, Any], rule: str, details: dict[str, Any]) -> None:
        """Write a row to the list of dropped ones."""
        row = {key: entry[key] for key in ("id", "file", "row")} | {"rule": rule} | details
        problem = {"problem": entry["problem"]} if entry["problem"] else {}
        self._dropped.write(_line(row | problem))
        self.counts.add(rule, entry, details)


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
