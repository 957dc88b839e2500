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

from benchmarks.arena.arms import SEEDS_PER_CHUNK
from benchmarks.arena.train import Setting, Trained, train

EVALUATE_EVERY = 20


@dataclass(frozen=True)
class Job:
    """One arm on one chunk of seeds."""

    setting: Setting
    chunk: int

    @property
    def seeds(self) -> range:
        return range(self.chunk * SEEDS_PER_CHUNK, (self.chunk + 1) * SEEDS_PER_CHUNK)

    def path(self, folder: Path) -> Path:
        """File of its result, named by a digest of its settings."""
        digest = sha256(repr(_given(self.setting)).encode()).hexdigest()[:12]
        return folder / f"{self.setting.method.name}-{digest}-{self.chunk}.npz"


def _given(record: Any) -> list[tuple[str, Any]]:
    """Fields that are not at their defaults, so that a new field does not change the digest."""
    values = [(field, getattr(record, field.name)) for field in fields(record)]
    return [
        (field.name, _given(value) if is_dataclass(value) else value)
        for field, value in values
        if value != field.default
    ]


def run(jobs: Iterable[Job], folder: Path, *, num_processes: int) -> None:
    """Train the jobs without a result in `folder`, and print the time left."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job in dict.fromkeys(jobs) if not job.path(folder).exists()]
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        waiting = [pool.submit(_train, job, folder) for job in missing]
        for done, future in enumerate(as_completed(waiting), start=1):
            future.result()
            elapsed = time.monotonic() - begin
            left = elapsed / done * (len(missing) - done)
            print(f"{done} of {len(missing)}, {elapsed:.0f} s, {left:.0f} s left", flush=True)


def _train(job: Job, folder: Path) -> None:
    torch.set_num_threads(1)
    begin = time.monotonic()
    trained = train(job.setting, job.seeds, evaluate_every=EVALUATE_EVERY)
    path = job.path(folder)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(
            file,
            curve=trained.curve.numpy(),
            per_c=trained.per_c.numpy(),
            seconds=time.monotonic() - begin,
        )
    part.replace(path)


def read(setting: Setting, num_chunks: int, folder: Path) -> list[Trained]:
    """Read an arm's results by chunk."""
    found = []
    for chunk in range(num_chunks):
        with np.load(Job(setting, chunk).path(folder)) as file:
            found.append(Trained(*(torch.from_numpy(file[key]) for key in ("curve", "per_c"))))
    return found


def seconds(jobs: Sequence[Job], folder: Path) -> float:
    """Core seconds that `jobs` took in total."""
    total = 0.0
    for job in dict.fromkeys(jobs):
        with np.load(job.path(folder)) as file:
            total += float(file["seconds"])
    return total
