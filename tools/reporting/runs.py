"""Content of run folders: config, metrics and timings; also of runs still training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapo_megatron.config import CONFIG_NAME, Config, load_recorded
from gapo_megatron.config.methods import Method
from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import open_file, parse_json, read_text
from gapo_megatron.io.files import naming, real
from gapo_megatron.io.metric_files import METRICS_NAME, TIMINGS_NAME, read_rows
from gapo_megatron.io.run_folder import BRANCH_NAME, find_runs, read_changes

Values = dict[int, float]
"""Step -> value, in step order."""


@dataclass(frozen=True)
class Run:
    """One run, up to its last complete step."""

    folder: Path
    config: Config
    branch: dict[str, Any] | None
    """Branch point: `run` (folder), `step` and `changes`, key -> (there, here); None: no branch."""
    metrics: dict[str, Values]
    """Metric -> its finite values."""
    timings: list[dict[str, float]]
    """A row per step (`time/step_s`, ...), and one per start (`startup/<part>_s`)."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Settings changed when it was resumed (`run_folder.read_changes`)."""

    @property
    def method(self) -> Method:
        return self.config.objective.resolve()

    @property
    def k(self) -> int:
        return self.config.batch.rollouts_per_prompt

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def num_steps(self) -> int:
        """Steps trained so far, those before a branch included."""
        return (
            max([*self.series("reward/mean"), *self.series("reward/unknown_share")], default=-1) + 1
        )

    @property
    def hours(self) -> float:
        """Hours of all starts and steps; without those before a branch, which are another run's."""
        seconds = (
            value
            for row in self.timings
            for key, value in row.items()
            if key == "time/step_s" or key.startswith("startup/")
        )
        return sum(seconds) / 3600

    def series(self, key: str) -> Values:
        """Values of a metric; empty if the run has none."""
        return self.metrics.get(key, {})

    def keys(self, pattern: str) -> list[str]:
        """Metrics whose whole name matches, sorted by the numbers in them ("c9" before "c10")."""
        names = [key for key in self.metrics if re.fullmatch(pattern, key)]
        return sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


def find_trained(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Find runs: each of `folders` is a run's folder or one of runs (a study's); none twice.

    Returns:
        Folders of runs in the order given (in a folder of runs: by name); folders of runs that
        have not trained a step yet.

    Raises:
        DataError: a folder without runs, or no run that has trained a step.
    """
    inside: dict[Path, None] = {}
    for folder in folders:
        if not (found := find_runs(folder)):
            raise DataError(
                f"{folder}: {'no run here' if folder.exists() else 'no such folder'}; a run's "
                f"folder holds {CONFIG_NAME} and {METRICS_NAME}, a study's holds folders of runs"
            )
        inside |= {real(path): None for path in found}
    ready = [path for path in inside if _has_trained(path / METRICS_NAME)]
    waiting = [path for path in inside if path not in ready]
    if not ready:
        shown = ", ".join(map(str, waiting))
        raise DataError(f"{shown}: no training step in {METRICS_NAME} yet")
    return ready, waiting


def _has_trained(path: Path) -> bool:
    """Whether a complete line is a training step; the evaluation at step 0 is none."""
    if not path.exists():
        return False
    with naming(path), open_file(path) as file:
        return b'"reward/' in file.read().rpartition(b"\n")[0]


def read_run(folder: Path) -> Run:
    """Read a run.

    Raises:
        DataError: names the file: no config, a line that is not a JSON object of numbers with a
            step, metrics of another k than the config's, a damaged branch.
        ConfigError: its config is not valid.
    """
    path = folder / CONFIG_NAME
    if not path.exists():
        raise DataError(
            f"{folder}: no {CONFIG_NAME}, which training writes at its start: the run's method, "
            "k, clips and seed are unknown"
        )
    metrics: dict[str, Values] = {}
    for row in read_rows(folder / METRICS_NAME):
        for key, value in row.items():
            metrics.setdefault(key, {})[int(row["step"])] = value
    run = Run(
        folder=folder,
        config=load_recorded(folder / CONFIG_NAME),
        branch=_branch(folder / BRANCH_NAME),
        metrics=metrics,
        timings=read_rows(folder / TIMINGS_NAME),
        changes=read_changes(folder),
    )
    # A run restarted with another k would mix two meanings of c.
    numbers = [int(key.rpartition("c")[2]) for key in run.keys(r"per_c/groups/c\d+")]
    if numbers and max(numbers) != run.k:
        raise DataError(
            f"{run.folder}: {METRICS_NAME} holds groups of k = {max(numbers)} rollouts, "
            f"{CONFIG_NAME} says batch.rollouts_per_prompt = {run.k}: a run has one k"
        )
    return run


def _branch(path: Path) -> dict[str, Any] | None:
    try:
        text = read_text(path, error=DataError)
    except FileNotFoundError:
        return None
    return parse_branch(text, where=str(path))


def parse_branch(text: str, *, where: str) -> dict[str, Any]:
    """Parse a `branch.json`.

    Raises:
        DataError: names `where` and the rule.
    """
    branch: dict[str, Any] = parse_json(text, where=where, error=DataError)
    try:
        run, step, changes = branch["run"], branch["step"], branch["changes"]
        is_whole = isinstance(run, str) and type(step) is int
        is_whole &= all(len(pair) == 2 for pair in changes.values())
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise DataError(
            f"{where}: not a branch: it needs `run` (a folder), `step` (a whole number) and "
            "`changes` (setting: [there, here])"
        )
    return branch
