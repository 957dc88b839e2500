"""Write and read samples.jsonl and timelines.jsonl, in a bounded space.

Some responses of each step as text; and when their turns and an environment's calls took place: in
a file of its own, because a resumed run repeats the samples, but not the clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import open_file
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.io.metric_files import lines_before
from gapo_megatron.types import Sample, Timeline

SAMPLES_NAME = "samples.jsonl"
TIMELINES_NAME = "timelines.jsonl"
MAX_BYTES = 2**26
"""Size at which a file becomes the earlier one (`samples.1.jsonl`), whose lines are lost then."""

_KINDS: dict[str, TypeAdapter[Any]] = {
    SAMPLES_NAME: TypeAdapter(Sample),
    TIMELINES_NAME: TypeAdapter(Timeline),
}
"""What a line of each file is."""


class SampleLog:
    """Appends samples, or their timelines, to the files of a run; for one process."""

    def __init__(self, run_dir: Path, *, name: str = SAMPLES_NAME) -> None:
        """Change nothing yet. `name`: of the file."""
        self._path = run_dir / name
        self._has_begun = False

    def begin(self, step: int) -> None:
        """Drop incomplete lines, and those of `step` and later: a resumed run writes them again.

        Later calls do nothing.

        Raises:
            MachineError: the disk is full or fails.
        """
        if not self._has_begun:
            self._drop(from_step=step)
            self._has_begun = True

    def append(self, samples: Sequence[Sample] | Sequence[Timeline]) -> None:
        """Write a line for each, after `begin`; all are on disk when this returns.

        Args:
            samples: samples of one step; at least one.

        Raises:
            MachineError: the disk is full or fails.
        """
        self.begin(samples[0].step)
        path = self._path
        lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in samples)
        with naming(path):
            if path.exists() and path.stat().st_size >= MAX_BYTES:
                path.replace(_earlier(path))
            with open(path, "a", encoding="utf-8") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())

    def _drop(self, *, from_step: int) -> None:
        for path in (_earlier(self._path), self._path):
            with naming(path):
                kept, _ = lines_before(path, resume_step=from_step)
                if kept:
                    write_atomically(path, b"".join(kept))
                else:
                    path.unlink(missing_ok=True)


def read_samples(run_dir: Path) -> list[Sample]:
    """Read the samples of a run, in the order of steps; an incomplete last line is left out.

    Raises:
        DataError: a line is something else; names file and line.
    """
    return _read(run_dir / SAMPLES_NAME)


def read_timelines(run_dir: Path) -> list[Timeline]:
    """Read the timelines of a run's samples; as `read_samples`."""
    return _read(run_dir / TIMELINES_NAME)


def _earlier(path: Path) -> Path:
    return path.with_suffix(f".1{path.suffix}")


def _read(latest: Path) -> list[Any]:
    """The lines of a file and of the earlier one, in order."""
    found = []
    for path in (_earlier(latest), latest):
        if not path.exists():
            continue
        with naming(path), open_file(path) as file:
            lines = file.read().split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                found.append(_KINDS[latest.name].validate_json(line))
            except ValidationError as error:
                [first, *_] = error.errors()
                where = ".".join(map(str, first["loc"]))
                raise DataError(
                    f"{path}:{number}: {where or f'not a {latest.stem[:-1]}'}: {first['msg']}"
                ) from None
    return found
