"""Write and read samples.jsonl: some responses of each step as text, in a bounded space."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import open_file
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.io.metric_files import lines_before
from gapo_megatron.types import Sample

SAMPLES_NAME = "samples.jsonl"
EARLIER_NAME = "samples.1.jsonl"
"""The lines before those of `SAMPLES_NAME`, once that has been full."""
MAX_BYTES = 2**26
"""Size at which `SAMPLES_NAME` becomes `EARLIER_NAME`, whose lines are lost then."""

_SAMPLE = TypeAdapter(Sample)


class SampleLog:
    """Appends samples to the files of a run; for one process."""

    def __init__(self, run_dir: Path) -> None:
        """Change nothing yet."""
        self._run_dir = run_dir
        self._has_begun = False

    def append(self, samples: Sequence[Sample]) -> None:
        """Write a line for each sample; all are on disk when this returns.

        The first call drops incomplete lines, and those of its step and later ones: a resumed run
        writes them again.

        Args:
            samples: of one step; at least one.

        Raises:
            MachineError: the disk is full or fails.
        """
        if not self._has_begun:
            self._drop(from_step=samples[0].step)
            self._has_begun = True
        path = self._run_dir / SAMPLES_NAME
        lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in samples)
        with naming(path):
            if path.exists() and path.stat().st_size >= MAX_BYTES:
                path.replace(path.with_name(EARLIER_NAME))
            with open(path, "a", encoding="utf-8") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())

    def _drop(self, *, from_step: int) -> None:
        for path in (self._run_dir / EARLIER_NAME, self._run_dir / SAMPLES_NAME):
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
    samples = []
    for path in (run_dir / EARLIER_NAME, run_dir / SAMPLES_NAME):
        if not path.exists():
            continue
        with naming(path), open_file(path) as file:
            lines = file.read().split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                samples.append(_SAMPLE.validate_json(line))
            except ValidationError as error:
                [first, *_] = error.errors()
                where = ".".join(map(str, first["loc"]))
                raise DataError(
                    f"{path}:{number}: {where or 'not a sample'}: {first['msg']}"
                ) from None
    return samples
