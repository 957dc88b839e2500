"""The folder that preparation writes: problems, dropped rows with reasons, and a manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROBLEMS, DROPPED, MANIFEST = "problems.jsonl", "dropped.jsonl", "manifest.json"
TESTS = "tests.jsonl"
"""Tests of programs, one problem's per line, which rows of the problem file refer to."""


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

    def add(self, entry: dict[str, Any]) -> None:
        """Count a row by the rule that it broke."""
        self.read += 1
        if rule := entry["rule"]:
            self.dropped[rule] += 1
        else:
            self.written += 1
        if entry["level"]:
            self.levels.setdefault(entry["level"], Counter())[rule or "written"] += 1
        if rule == "held_out":
            self.benchmarks[entry["details"]["same_as"].rpartition("-")[0]] += 1


def write_rows(folder: Path, entries: Iterable[dict[str, Any]]) -> Counts:
    """Write the rows that break no rule as problems, and list the others; returns their numbers."""
    counts = Counts()
    with open(folder / PROBLEMS, "wb") as problems, open(folder / DROPPED, "wb") as dropped:
        for entry in entries:
            counts.add(entry)
            if entry["rule"]:
                row = {key: entry[key] for key in ("id", "file", "row", "rule")} | entry["details"]
                more, file = "problem", dropped
            else:
                key = "prompt" if isinstance(entry["prompt"], str) else "messages"
                row = {"id": entry["id"], key: entry["prompt"], "answer": entry["answer"]}
                row |= entry["kept"]
                more, file = "level", problems
            row |= {more: entry[more]} if entry[more] else {}
            file.write(json.dumps(row).encode() + b"\n")
    return counts
