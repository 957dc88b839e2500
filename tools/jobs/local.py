"""Run a study on this machine, a few runs at a time, in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import submitit
from rich.console import Console

from gapo_megatron.errors import ConfigError
from gapo_tools.jobs.status import Status, live_table, read_status
from gapo_tools.jobs.submit import Launch, Submission, outside_slurm

_YEARS_MIN = 10 * 365 * 24 * 60
"""submitit requires a time limit; local runs have none."""
_LOOK_EVERY_S = 1.0
_REST = 50
"""Pause between updates of the table, as a multiple of the time that one takes."""


def run_locally(
    submissions: Sequence[Submission], console: Console, *, title: str, parallel: int
) -> list[Status]:
    """Run all submissions, one after another, and show a table of their status.

    The first Ctrl-C (or SIGTERM, or SIGHUP) asks running runs to save and stop, and starts no
    further ones; the second ends them at once. If this process is killed, running runs continue.

    Args:
        submissions: at least one; their nodes and chains are ignored.
        console: for the table.
        title: title of the table.
        parallel: runs at the same time.

    Returns:
        Status of each run when none is running any more.
    """
    local = _LocalRuns(submissions, parallel=parallel)
    with live_table(console, title=title) as show, _requests() as requests:
        asked, rest_until, under_way = 0, 0.0, local.under_way()
        while not local.look():
            if len(requests) > asked:
                asked = len(requests)
                console.print(
                    "Asked the runs to save and stop; press Ctrl-C again to end them at once"
                    if asked == 1
                    else "Ending the runs"
                )
            local.stop(at_once=asked > 1) if asked else local.start()
            began = time.monotonic()
            if began >= rest_until or under_way != local.under_way():
                under_way = local.under_way()
                show(local.statuses())
                rest_until = began + _REST * (time.monotonic() - began)
            time.sleep(_LOOK_EVERY_S)
        show(local.statuses())
    return local.statuses()


def gpu_shares(num_gpus: int, *, number: int) -> list[list[int]]:
    """Divide the GPUs that this process may use into `number` lists of `num_gpus` each.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES has too few GPUs, or names that are not numbers.
    """
    if not num_gpus:
        return [[] for _ in range(number)]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = range(num_gpus * number) if allowed is None else allowed.split(",") if allowed else []
    try:
        gpus = [int(name) for name in names]
    except ValueError:  # submitit supports only numbers
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES ({allowed}) must list numbers such as 0,1 with --local, not "
            "GPU-... or MIG-..."
        ) from None
    if len(gpus) < num_gpus * number:
        raise ConfigError(
            f"gpus_per_node ({num_gpus}) x --parallel ({number}) must be at most the number of "
            f"GPUs in CUDA_VISIBLE_DEVICES ({allowed})"
        )
    return [gpus[slot * num_gpus : (slot + 1) * num_gpus] for slot in range(number)]


class _LocalRuns:
    """Waiting runs, and running ones by slot; each slot has its own share of the GPUs."""

    def __init__(self, submissions: Sequence[Submission], *, parallel: int) -> None:
        self._of = {code: one for one in submissions for code in one.codes}
        self._waiting = list(self._of)
        self._jobs: dict[int, tuple[Path, submitit.Job[dict[str, Any]]]] = {}
        self._terminated: set[str] = set()
        most = max(one.resources.num_gpus_per_node for one in submissions)
        self._gpus = gpu_shares(most, number=parallel)

    def look(self) -> bool:
        """Drop runs that have ended; True when no run is left."""
        self._jobs = {slot: one for slot, one in self._jobs.items() if not one[1].done()}
        return not self._waiting and not self._jobs

    def under_way(self) -> set[Path]:
        """Code folders of the running runs."""
        return {code for code, _ in self._jobs.values()}

    def start(self) -> None:
        """Start runs while slots are free."""
        for slot in range(len(self._gpus)):
            if slot not in self._jobs and self._waiting:
                code = self._waiting.pop(0)
                self._jobs[slot] = code, self._submit(code, slot)

    def stop(self, *, at_once: bool) -> None:
        """Start no further run; ask running ones to stop, repeatedly, as one may be restarting."""
        self._waiting.clear()
        for code, job in self._jobs.values():
            attempt = code.parents[1] / "attempts" / "latest"
            if attempt.is_dir():
                (attempt / "stop").touch()
            if at_once and job.job_id not in self._terminated:
                self._terminated.add(job.job_id)
                os.kill(int(job.job_id), signal.SIGTERM)  # submitit's controller passes it on

    def statuses(self) -> list[Status]:
        """Status of every run as its folder says, except that a running one has not failed yet."""
        states = dict.fromkeys(self._waiting, "queued")
        states |= dict.fromkeys(self.under_way(), "running")
        found = [(code, read_status(code.parents[1])) for code in self._of]
        return [
            replace(status, state=states[code], why="") if code in states else status
            for code, status in found
        ]

    def _submit(self, code: Path, slot: int) -> submitit.Job[dict[str, Any]]:
        submission = self._of[code]
        gpus = self._gpus[slot][: submission.resources.num_gpus_per_node]
        executor = submitit.LocalExecutor(submission.folder)
        executor.update_parameters(
            timeout_min=_YEARS_MIN,
            gpus_per_node=len(gpus),
            visible_gpus=gpus,
            stderr_to_stdout=True,
        )
        environment = {
            "PYTHONPATH": str(code),
            "PYTHONSAFEPATH": "1",
            "PYTHON": os.environ.get("PYTHON", sys.executable),
            "WORLD_SIZE": str(submission.resources.tasks_per_node),
        }
        with outside_slurm(environment), _deaf():
            return executor.submit(Launch(str(code)))


@contextmanager
def _requests() -> Iterator[Sequence[int]]:
    """Catch SIGINT, SIGTERM and SIGHUP; yields the list of those received so far."""
    came: list[int] = []

    def note(number: int, _: Any) -> None:
        came.append(number)
        if number == signal.SIGHUP:  # the terminal is gone: writing to it would fail
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nothing, descriptor)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        numbers.remove(signal.SIGHUP)
    with _handling(numbers, note):
        yield came


def _deaf() -> AbstractContextManager[None]:
    """Make child processes ignore SIGINT and SIGHUP, which are for this process."""
    return _handling([signal.SIGINT, signal.SIGHUP], signal.SIG_IGN)


@contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    """Handle signals in another way inside the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
