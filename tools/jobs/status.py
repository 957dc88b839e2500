"""Status of runs, from their folders and from Slurm, if there is one.

Imports only the standard library and rich.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gapo_megatron.errors import ConfigError, DataError, printable, shown
from gapo_megatron.io.documents import open_file, parse_json, read_toml
from gapo_megatron.io.run_folder import is_finished
from gapo_megatron.launch.postmortem import Evidence

JOBS_NAME = "jobs"
"""File in a run folder with the ids of the run's Slurm jobs, one per line, oldest first."""
_BEYOND_METRICS = 1e10
# A run's states without a job, and those of Slurm that are a job's last; others may be of one held.
_ENDED = (
    *("finished", "stopped", "queued", "gone", "started"),
    *("completed", "failed", "cancelled", "timeout", "node_fail", "boot_fail", "out_of_memory"),
    *("deadline", "preempted", "revoked"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of one run."""

    run_dir: str
    state: str
    """`finished`, `stopped`, `failed`, `queued` (not started), `gone` (not started, and Slurm no
    longer knows the job), `running`, `started` (without the launcher, so no more is known),
    `unknown` (Slurm does not answer), or another state of Slurm in lower case."""
    job: str
    """Slurm's job id, or the name of the local attempt; empty before the first."""
    attempts: int
    """Number of starts, including the first."""
    steps: int
    num_steps: int
    """`run.num_steps` of the newest submission, else of the newest start; 0 if there is none."""
    reward: float | None
    """Newest reward/mean."""
    pass_at_1: float | None
    """Newest eval/pass@1."""
    elapsed_s: float
    """Total seconds of all starts and steps; a step that a restart repeats counts once."""
    why: str = ""
    """First line of the newest attempt's postmortem; empty unless the run failed."""

    @property
    def is_active(self) -> bool:
        """Whether a job of the run has not ended; it may be held."""
        return self.state not in _ENDED


def read_status(run_dir: Path) -> Status:
    """Status of a run from its folder only, with the reason of a failure.

    States that only Slurm knows appear as `failed` or `queued`.

    Raises:
        ConfigError: a file of the run cannot be read; names it.
    """
    return _explain(_read_folder(run_dir))


def _explain(status: Status) -> Status:
    """Add why a run failed; only then, because this reads the logs of all ranks."""
    newest = Path(status.run_dir) / "attempts" / "latest"
    fine = status.is_active or status.state in ("finished", "stopped", "cancelled")
    if fine or not newest.exists():
        return status
    return replace(status, why=printable(Evidence(newest).diagnose().lines[0]))


def _read_folder(run_dir: Path) -> Status:
    attempts = [path for path in run_dir.glob("attempts/*/") if not path.is_symlink()]
    newest = run_dir / "attempts" / "latest"
    metrics = _lines(run_dir / "metrics.jsonl")
    trained, evaluated = _newest(metrics, "reward/mean"), _newest(metrics, "eval/pass@1")
    steps, num_steps = int(trained.get("step", -1)) + 1, _num_steps(run_dir)
    timings = map(_values, _lines(run_dir / "timings.jsonl"))
    owner = _text(run_dir / "OWNER")
    # The state, as far as the folder shows it.
    state = "queued"
    if newest.exists():
        state = _text(newest / "outcome")
        if state not in ("finished", "stopped"):
            state = "running" if _is_alive(owner) else "failed"
        if state == "finished" and steps < num_steps:  # submitted again with more steps
            state = "stopped"
    else:
        if trained or evaluated:
            state = "started"
        with suppress(ConfigError):  # damaged: the next start reports it
            if is_finished(run_dir, num_steps=max(num_steps, 1)):  # trained without the launcher
                state = "finished"
    return Status(
        run_dir=str(run_dir),
        state=state,
        job=owner.rpartition(".")[0],
        attempts=len(attempts),
        steps=steps,
        num_steps=num_steps,
        reward=trained.get("reward/mean"),
        pass_at_1=evaluated.get("eval/pass@1"),
        elapsed_s=sum(map(_seconds, timings)),
    )


def read_statuses(run_dirs: Sequence[Path]) -> list[Status]:
    """Statuses of runs as `read_status`, corrected by the states of their Slurm jobs."""
    found = [_read_folder(run_dir) for run_dir in run_dirs]
    jobs = [_jobs(run_dir / JOBS_NAME) for run_dir in run_dirs]
    for ids, status in zip(jobs, found, strict=True):
        # Jobs of plain sbatch are not recorded, nor are starts by hand in a job (JOB-TIME-PID).
        if not ids and (job := status.job.partition("-")[0]).isdigit():
            ids.append(job)
    states = ask_slurm({one for ids in jobs for one in ids})
    return [
        _explain(_correct(status, ids, states)) for status, ids in zip(found, jobs, strict=True)
    ]


def ask_slurm(jobs: Iterable[str]) -> dict[str, str]:
    """State of each job that Slurm remembers, in lower case; `unknown` if it does not answer.

    squeue knows the jobs of the last minutes, sacct (with accounting) earlier ones.
    """
    asked = sorted(set(jobs))
    if not asked:
        return {}
    squeue = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T"]
    states = _ask(squeue, asked)
    if states is None:
        return dict.fromkeys(asked, "unknown")
    if forgotten := [job for job in asked if job not in states]:
        sacct = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State"]
        states |= _ask(sacct, forgotten) or {}
    return {job: states[job] for job in asked if job in states}


def status_table(statuses: Sequence[Status], *, title: str) -> Table:
    """Table with one row per run."""
    # Text, not markup: names and messages may have brackets.
    table = Table(title=Text(title, style="table.title"), title_justify="left", padding=0)
    # In a narrow terminal names and ids fold; a truncated number would be useless.
    table.add_column("run", overflow="fold")
    table.add_column("job", overflow="fold")
    for heading in ("state", "attempts", "step", "reward", "pass@1", "elapsed"):
        justify: Literal["left", "right"] = "left" if heading == "state" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    table.add_column("why", overflow="fold")
    for one in statuses:
        table.add_row(
            Text(Path(one.run_dir).name),
            Text(one.job),
            Text(one.state),
            str(one.attempts),
            f"{one.steps}/{one.num_steps}",
            "" if one.reward is None else f"{one.reward:.3f}",
            "" if one.pass_at_1 is None else f"{one.pass_at_1:.3f}",
            str(timedelta(seconds=round(one.elapsed_s))),
            Text(one.why),
        )
    return table


@contextmanager
def live_table(console: Console, *, title: str) -> Iterator[Callable[[Sequence[Status]], None]]:
    """Yields a function that shows statuses: in place on a terminal, else one line per change."""
    shown: dict[str, str] = {}
    with Live(console=console, auto_refresh=False) as live:

        def show(statuses: Sequence[Status]) -> None:
            live.update(status_table(statuses, title=title), refresh=True)
            for one in statuses:
                if not console.is_terminal and shown.get(one.run_dir) != one.state:
                    line = f"{Path(one.run_dir).name}: {one.state}"
                    console.print(line, highlight=False)
                shown[one.run_dir] = one.state

        yield show
    if not console.is_terminal:  # Live does not end the table's last line
        console.line()


def _correct(status: Status, jobs: list[str], states: dict[str, str]) -> Status:
    """Correct a status by the states of the run's `jobs`, oldest first."""
    known = [job for job in jobs if job in states]
    if not jobs:
        return status
    if status.state == "finished":  # OWNER has the job id, but not that of the array task
        return status if status.job in jobs else replace(status, job=jobs[-1])
    if not known:
        state = "gone" if status.state == "queued" else status.state
        return replace(status, job=jobs[-1], state=state)
    # In a chain: the link that runs or is next, else the last one.
    job = next((job for job in known if states[job] not in _ENDED), known[-1])
    state = status.state if states[job] == "completed" else states[job]
    return replace(status, job=job, state=state)


def _jobs(path: Path) -> list[str]:
    jobs = _text(path).split()
    for job in jobs:
        if not re.fullmatch(r"[0-9]{1,20}(_[0-9]{1,20})?", job):
            raise ConfigError(f"{path}: {shown(job)} is not a Slurm job id")
    return jobs


def _num_steps(run_dir: Path) -> int:
    configs = [path for path in run_dir.glob("code/*/config.toml") if path.is_file()]
    if configs:
        return _num_steps_of(max(configs, key=lambda path: path.stat().st_mtime_ns))
    with suppress(ConfigError, FileNotFoundError):  # damaged: the next start rewrites it
        return _num_steps_of(run_dir / "config.toml")
    return 0


def _num_steps_of(config: Path) -> int:
    section = read_toml(config).get("run")
    num_steps = section.get("num_steps") if isinstance(section, dict) else None
    if not isinstance(num_steps, int):
        raise ConfigError(f"{config}: run.num_steps ({shown(num_steps)}) must be a whole number")
    return num_steps


def _is_alive(attempt: str) -> bool:
    """Whether a local attempt, `local-<time>-<process id>.<count>`, still runs on this machine."""
    local = re.fullmatch(r"local-[^.]*-([0-9]{1,10})\..*", attempt)
    return local is not None and "launch.sh" in _text(Path("/proc") / local[1] / "cmdline")


def _lines(path: Path) -> list[bytes]:
    """Complete lines; the last one may still be written."""
    return _content(path).split(b"\n")[:-1]


def _newest(lines: list[bytes], key: str) -> dict[str, float]:
    quoted = json.dumps(key).encode()
    rows = (_values(line) for line in reversed(lines) if quoted in line)
    return next((row for row in rows if key in row), {})


def _values(line: bytes) -> dict[str, float]:
    """Numbers of one line; empty if the line is damaged."""
    try:
        values = parse_json(line, where="", error=DataError)
    except DataError:
        return {}
    if not isinstance(values, dict):
        return {}
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and abs(value) < _BEYOND_METRICS  # excludes infinity
    }


def _seconds(timings: dict[str, float]) -> float:
    """Seconds of one line of the timings: a step, or the parts of a start."""
    parts = (value for key, value in timings.items() if key.startswith("startup/"))
    return timings.get("time/step_s", 0.0) + sum(parts)


def _text(path: Path) -> str:
    return _content(path).decode("utf-8", errors="replace").strip()


def _content(path: Path) -> bytes:
    """Content of a file; empty if there is none.

    Raises:
        ConfigError: the file cannot be read; names it.
    """
    try:
        with open_file(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):  # the latter in /proc
        return b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _ask(command: list[str], jobs: list[str]) -> dict[str, str] | None:
    """State by job id; None if the command fails or is not installed."""
    kept = {key: one for key, one in os.environ.items() if not key.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            [*command, f"--jobs={','.join(jobs)}"], capture_output=True, text=True, env=kept
        )
    except FileNotFoundError:
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    # With SLURM_CLUSTERS a line before them names the cluster.
    answers = (line.split("|") for line in done.stdout.splitlines() if "|" in line)
    states = [(job, state.split()[0].lower()) for job, state in answers]  # "CANCELLED by 1000"
    # A job that got SIGSTOP has not ended, as a run that stopped has.
    states = [(job, "suspended" if state == "stopped" else state) for job, state in states]
    # Clusters may have jobs of the same id: what one has ended says nothing of the other's.
    return dict(sorted(states, key=lambda answer: answer[1] not in _ENDED))
