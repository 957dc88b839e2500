"""The file of one evaluation: of every problem how many samples are right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gapo_megatron.errors import DataError

Counts = list[dict[str, Any]]
"""One entry per problem, in file order: id, level, num_samples (verdicts known), num_correct."""


def write_counts(counts: Counts, path: Path) -> None:
    """Write the file; a killed run leaves the old one or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    lines = ",\n".join(json.dumps(entry) for entry in counts)
    partial.write_text(f'{{"problems": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(partial, path)


def read_counts(path: Path) -> Counts:
    """Read a file that `write_counts` wrote.

    Raises:
        DataError: names the file and what is wrong in it.
    """
    try:
        counts: Counts = json.loads(path.read_text(encoding="utf-8"))["problems"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not an evaluation's file: {error!r}") from None
    for number, entry in enumerate(counts, start=1):
        try:
            is_whole = 0 <= entry["num_correct"] <= entry["num_samples"] and entry["id"] != ""
        except (KeyError, TypeError):
            is_whole = False
        if not is_whole:
            raise DataError(
                f"{path}: problem {number} ({entry!r}) needs an id and "
                "0 <= num_correct <= num_samples"
            )
    return counts
