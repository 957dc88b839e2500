"""Read and check metrics.jsonl and timings.jsonl of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import open_file, parse_json
from gapo_megatron.io.files import naming

METRICS_NAME = "metrics.jsonl"
TIMINGS_NAME = "timings.jsonl"
Value = float | int


def read_rows(path: Path) -> list[dict[str, float]]:
    """Read the complete lines of metrics or timings, without nulls.

    A last line without a newline is still being written, and is left out.

    Raises:
        DataError: a line is not a JSON object of numbers with a step; names file and line.
    """
    if not path.exists():
        return []
    rows = []
    with naming(path), open_file(path) as file:
        whole = file.read().split(b"\n")[:-1]
    for number, line in enumerate(whole, start=1):
        row = {k: v for k, v in _parse(path, number, line).items() if v is not None}
        for key, value in row.items():
            if type(value) not in (int, float):
                raise DataError(f"{path}:{number}: {key} = {value!r} is not a number")
        rows.append(row)
    return rows


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    row = parse_json(line, where=f"{path}:{number}", error=DataError)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError(f"{path}:{number}: not a JSON object with a step")
    return row


def last_step(path: Path) -> int | None:
    """Step of the last complete line of metrics; None if there is none."""
    with naming(path):
        try:
            with open_file(path) as file:
                whole = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
    for number, line in reversed([*enumerate(whole, start=1)]):
        with contextlib.suppress(DataError):  # a resume drops or refuses damaged lines
            return int(_parse(path, number, line)["step"])
    return None


def check_metrics(run_dir: str | Path, *, resume_step: int) -> None:
    """Refuse metrics that `MetricsWriter` would refuse, before heavy work; changes nothing.

    Raises:
        DataError: damaged metrics of a step that will not run again.
    """
    path = Path(run_dir) / METRICS_NAME
    with naming(path):
        lines_before(path, resume_step=resume_step)


def lines_before(path: Path, *, resume_step: int) -> tuple[list[bytes], list[DataError]]:
    """The complete lines of steps before `resume_step`, and the errors of damaged ones.

    Raises:
        DataError: a damaged line of metrics is followed by kept ones, so its step will not run
            again. In timings, which are not results, such a line is dropped.
    """
    kept: list[bytes] = []
    damage: list[DataError] = []
    try:
        with open_file(path) as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise DataError(f"{path}:{number}: cut off")
            step = _parse(path, number, line)["step"]
        except DataError as error:
            damage.append(error)
            continue
        # Startup lines of all attempts are kept.
        is_startup = path.name == TIMINGS_NAME and b'"startup/' in line
        if step < resume_step or is_startup:
            if damage and path.name == METRICS_NAME:
                raise DataError(f"{damage[0]}; repair or remove it: that step will not run again")
            kept.append(line)
    return kept, damage
