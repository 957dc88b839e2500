"""The file of one evaluation: the number of correct samples of each problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import read_json
from gapo_megatron.io.files import write_atomically

Counts = list[dict[str, Any]]
"""One entry per problem, in file order: id, level, num_samples (verdicts known), num_correct."""


def write_counts(counts: Counts, path: Path) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(entry) for entry in counts)
    write_atomically(path, f'{{"problems": [\n{lines}\n]}}')


def read_counts(path: Path) -> Counts:
    """Read a file that `write_counts` wrote.

    Raises:
        DataError: names the file and what is wrong in it.
    """
    try:
        raw = read_json(path, error=DataError)
    except FileNotFoundError:  # such as a dangling link
        raise DataError(f"{path} does not exist") from None
    counts: Counts | None = raw.get("problems") if isinstance(raw, dict) else None
    if not isinstance(counts, list):
        raise DataError(f"{path}: must be the file of an evaluation, with a list `problems`")
    for number, entry in enumerate(counts, start=1):
        if not _is_whole(entry):
            raise DataError(
                f"{path}: problem {number} ({entry!r:.200}) needs an id and "
                "0 <= num_correct <= num_samples"
            )
    return counts


def _is_whole(entry: Any) -> bool:
    if not isinstance(entry, dict) or not entry.get("id") or not isinstance(entry["id"], str):
        return False
    correct, samples = entry.get("num_correct"), entry.get("num_samples")
    are_numbers = type(correct) is int and type(samples) is int and 0 <= correct <= samples
    return are_numbers and isinstance(entry.get("level", ""), str)
