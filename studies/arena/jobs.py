"""Train arms on chunks of seeds, one process per core; finished results are kept."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from studies.arena.arms import SEEDS_PER_CHUNK
from studies.arena.train import LATE, Setting, Trained, train

EVALUATE_EVERY = 20
SELECTION = -1
"""Number of the chunk whose seeds choose widths, and do nothing else."""
SELECTION_SEEDS = range(2_000_000, 2_000_032)
ARCHIVE = Path(__file__).with_name("results.npz")
"""Results of all jobs that README.md reports, for those who have not trained them."""
FIELDS = ("curve", "per_c", "moved", "progress")
"""Fields of `Trained`."""
CHOOSING = ("curve", "per_c")
"""Those that the archive keeps of seeds that choose widths."""
BITS = 12
"""Bits of the mantissa that the archive keeps: a pass rate of 50 % is right to 0.006 points."""


@dataclass(frozen=True)
class Job:
    """One arm on one chunk of seeds."""

    setting: Setting
    chunk: int

    @property
    def seeds(self) -> range:
        """Seeds of its chunk."""
        if self.chunk == SELECTION:
            return SELECTION_SEEDS
        return range(self.chunk * SEEDS_PER_CHUNK, (self.chunk + 1) * SEEDS_PER_CHUNK)

    @property
    def name(self) -> str:
        """Name of its result, with a digest of its settings."""
        digest = sha256(repr(_given(self.setting)).encode()).hexdigest()[:12]
        chunk = "selection" if self.chunk == SELECTION else self.chunk
        return f"{self.setting.method.name}-{digest}-{chunk}"


def _given(record: Any) -> list[tuple[str, Any]]:
    """Fields that are not at their defaults, so that a new field does not change the digest."""
    values = [(field, getattr(record, field.name)) for field in fields(record)]
    return [
        (field.name, _given(value) if is_dataclass(value) else value)
        for field, value in values
        if value != field.default
    ]


class Store:
    """Results in a folder, and in the archive if the folder lacks them."""

    def __init__(self, folder: Path, *, archive: Path = ARCHIVE) -> None:
        """Read the archive's list; the folder need not exist."""
        self.folder = folder
        self._archive = np.load(archive) if archive.exists() else None
        self._archived = set() if self._archive is None else set(self._archive["names"].tolist())

    def __contains__(self, job: Job) -> bool:
        return self._path(job).exists() or job.name in self._archived

    def _path(self, job: Job) -> Path:
        return self.folder / f"{job.name}.npz"

    def _arrays(self, job: Job) -> dict[str, np.ndarray]:
        if self._path(job).exists():
            with np.load(self._path(job)) as file:
                return {name: file[name] for name in (*FIELDS, "seconds")}
        if self._archive is None or job.name not in self._archived:
            raise FileNotFoundError(self._path(job))
        found = {name: self._archive[f"{job.name}/{name}"] for name in (*_kept(job), "seconds")}
        return dict.fromkeys(FIELDS, np.zeros(0)) | found

    def read(self, setting: Setting, chunks: Iterable[int]) -> list[Trained]:
        """An arm's results by chunk.

        Raises:
            FileNotFoundError: if one is missing.
        """
        found = []
        for chunk in chunks:
            arrays = self._arrays(Job(setting, chunk))
            values = {name: torch.from_numpy(arrays[name]).double() for name in FIELDS}
            found.append(Trained(**values))
        return found

    def seconds(self, jobs: Sequence[Job]) -> float:
        """Core seconds that `jobs` took in total."""
        return sum(float(self._arrays(job)["seconds"]) for job in dict.fromkeys(jobs))

    def run(self, jobs: Iterable[Job], *, num_processes: int) -> None:
        """Train the jobs without a result into the folder, and print the time left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        missing = [job for job in dict.fromkeys(jobs) if job not in self]
        begin = time.monotonic()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            waiting = [pool.submit(_train, job, self._path(job)) for job in missing]
            for done, future in enumerate(as_completed(waiting), start=1):
                future.result()
                elapsed = time.monotonic() - begin
                left = elapsed / done * (len(missing) - done)
                print(f"{done} of {len(missing)}, {elapsed:.0f} s, {left:.0f} s left", flush=True)

    def pack(self, jobs: Iterable[Job], archive: Path) -> None:
        """Write the results of `jobs` to one file, rounded."""
        wanted = list(dict.fromkeys(jobs))
        arrays: dict[str, Any] = {"names": np.array([job.name for job in wanted])}
        for job in wanted:
            found = self._arrays(job)
            for name in (*_kept(job), "seconds"):
                arrays[f"{job.name}/{name}"] = _shortened(found[name]).astype(np.float32)
        np.savez_compressed(archive, **arrays)


def _kept(job: Job) -> tuple[str, ...]:
    return CHOOSING if job.chunk == SELECTION else FIELDS


def _shortened(values: np.ndarray) -> np.ndarray:
    """Round to `BITS` of the mantissa: the rest of a float32 is zeros, which compress."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2**BITS) / 2**BITS, exponent)


def _train(job: Job, path: Path) -> None:
    torch.set_num_threads(1)
    begin = time.process_time()
    trained = train(
        job.setting,
        job.seeds,
        evaluate_every=EVALUATE_EVERY,
        evaluations=LATE if job.chunk == SELECTION else None,
    )
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        values = {name: getattr(trained, name).numpy() for name in FIELDS}
        np.savez(file, **values, seconds=time.process_time() - begin)
    part.replace(path)
