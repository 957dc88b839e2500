"""Status of runs: read from their folders and, where there is a Slurm, from it.

Light on purpose: the standard library, and rich for the table.
"""

from __future__ import annotations

import json
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

from gapo_megatron.errors import ConfigError, DataError, shown
from gapo_megatron.io.documents import open_file, parse_json, read_toml
from gapo_megatron.io.run_folder import is_finished
from gapo_megatron.ops.launch.postmortem import Evidence

JOBS_NAME = "jobs"
"""File in a run folder: ids of the Slurm jobs it was submitted as, one a line, oldest first."""
_BEYOND_METRICS = 1e10
_ACTIVE = (
    *("pending", "configuring", "running", "signaling", "suspended", "completing", "stage_out"),
    *("requeued", "unknown"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One run."""

    run_dir: str
    state: str
    """`finished`, `stopped`, `failed`, `queued` (not started), `gone` (nor known to Slurm any
    more), `running`, `started` (without a launcher, which would tell more), `unknown` (Slurm does
    not answer), or another of Slurm's, in lower case."""
    job: str
    """Slurm's id, or the name of the local attempt; empty before there is one."""
    attempts: int
    """Starts, the first included."""
    steps: int
    num_steps: int
    """Steps of the newest submission, else of the newest start; 0 where there was none."""
    reward: float | None
    """Newest reward/mean."""
    pass_at_1: float | None
    """Newest eval/pass@1."""
    elapsed_s: float
    """Seconds of all starts and steps together; a step that a restart repeats counts once."""
    why: str = ""
    """First failure of the newest attempt, by its postmortem; empty unless it failed."""

    @property
    def is_active(self) -> bool:
        """Whether the state will change without anybody's doing."""
        return self.state in _ACTIVE


def read_status(run_dir: Path) -> Status:
    """Status of a run by its folder alone, and why it failed.

    A state that only Slurm knows is `failed` or `queued` here.

    Raises:
        ConfigError: a file of it cannot be read; names it.
    """
    return _explain(_read_folder(run_dir))


def _explain(status: Status) -> Status:
    """Why it failed: reads the logs of all its ranks, hence only of a run that did."""
    newest = Path(status.run_dir) / "attempts" / "latest"
    if status.state in ("finished", "stopped", "cancelled", *_ACTIVE) or not newest.exists():
        return status
    return replace(status, why=Evidence(newest).diagnose().lines[0])


def _read_folder(run_dir: Path) -> Status:
    attempts = [path for path in run_dir.glob("attempts/*/") if not path.is_symlink()]
    newest = run_dir / "attempts" / "latest"
    metrics = _lines(run_dir / "metrics.jsonl")
    trained, evaluated = _newest(metrics, "reward/mean"), _newest(metrics, "eval/pass@1")
    steps, num_steps = int(trained.get("step", -1)) + 1, _num_steps(run_dir)
    timings = map(_values, _lines(run_dir / "timings.jsonl"))
    owner = _text(run_dir / "OWNER")
    state = "queued"
    if newest.exists():
        state = _text(newest / "outcome") or ("running" if _is_alive(owner) else "failed")
        if state == "finished" and steps < num_steps:  # submitted again, for more steps
            state = "stopped"
    else:
        if trained or evaluated:
            state = "started"
        with suppress(ConfigError):  # damaged: its next start says so
            if is_finished(run_dir, num_steps=max(num_steps, 1)):  # without a launcher
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
    """Statuses of runs like `read_status`, corrected by what Slurm says of their jobs."""
    found = [_read_folder(run_dir) for run_dir in run_dirs]
    jobs = [_jobs(run_dir / JOBS_NAME) for run_dir in run_dirs]
    for ids, status in zip(jobs, found, strict=True):
        # Started by sbatch, so not recorded; an array's task is known by its own name already.
        if status.job.isdigit() and not ids:
            ids.append(status.job)
    states = ask_slurm({one for ids in jobs for one in ids})
    return [
        _explain(_correct(status, ids, states)) for status, ids in zip(found, jobs, strict=True)
    ]


def ask_slurm(jobs: Iterable[str]) -> dict[str, str]:
    """State of each job that Slurm remembers, in lower case; `unknown` while it does not answer.

    squeue knows the jobs of the last minutes, sacct (where there is accounting) those before.
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
    """A row per run."""
    # Text, not markup: names and messages may have brackets.
    table = Table(title=Text(title, style="table.title"), title_justify="left", padding=0)
    # Names and ids give way where a terminal is narrow; numbers are useless in part.
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
    """Yields what shows the newest statuses: in place on a terminal, else a line per change."""
    shown: dict[str, str] = {}
    with Live(console=console, auto_refresh=False) as live:

        def show(statuses: Sequence[Status]) -> None:
            live.update(status_table(statuses, title=title), refresh=True)
            for one in statuses:
                if not console.is_terminal and shown.get(one.run_dir) != one.state:
                    line = f"{Path(one.run_dir).name}: {one.state}"
                    console.print(line, markup=False, highlight=False)
                shown[one.run_dir] = one.state

        yield show
    if not console.is_terminal:  # there, the table's last line is left open
        console.line()


def _correct(status: Status, jobs: list[str], states: dict[str, str]) -> Status:
    """`status` with what Slurm says of the run's `jobs`, oldest first."""
    known = [job for job in jobs if job in states]
    if not jobs:
        return status
    if status.state == "finished":  # OWNER has the job, but not as the task of an array
        return status if status.job in jobs else replace(status, job=jobs[-1])
    if not known:
        state = "gone" if status.state == "queued" else status.state
        return replace(status, job=jobs[-1], state=state)
    # Of a chain, the link that runs or is next; else the last one.
    job = next((job for job in known if states[job] in _ACTIVE), known[-1])
    state = status.state if states[job] == "completed" else states[job]
    return replace(status, job=job, state=state)


def _jobs(path: Path) -> list[str]:
    jobs = _text(path).split()
    for job in jobs:
        if not re.fullmatch(r"[0-9]{1,20}(_[0-9]{1,20})?", job):
            raise ConfigError(f"{path}: {shown(job)} is no id of a Slurm job")
    return jobs


def _num_steps(run_dir: Path) -> int:
    configs = [path for path in run_dir.glob("code/*/config.toml") if path.is_file()]
    if configs:
        return _num_steps_of(max(configs, key=lambda path: path.stat().st_mtime_ns))
    with suppress(ConfigError, FileNotFoundError):  # damaged: its next start writes it anew
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
    """Whole lines; the last one may be in the making."""
    return _content(path).split(b"\n")[:-1]


def _newest(lines: list[bytes], key: str) -> dict[str, float]:
    quoted = json.dumps(key).encode()
    rows = (_values(line) for line in reversed(lines) if quoted in line)
    return next((row for row in rows if key in row), {})


def _values(line: bytes) -> dict[str, float]:
    """Numbers of one line; none of one that is damaged."""
    try:
        values = parse_json(line, where="", error=DataError)
    except DataError:
        return {}
    if not isinstance(values, dict):
        return {}
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and abs(value) < _BEYOND_METRICS  # nor infinity
    }


def _seconds(timings: dict[str, float]) -> float:
    """Seconds of one line of the timings: of a step, or of the parts of a start."""
    parts = (value for key, value in timings.items() if key.startswith("startup/"))
    return timings.get("time/step_s", 0.0) + sum(parts)


def _text(path: Path) -> str:
    return _content(path).decode("utf-8", errors="replace").strip()


def _content(path: Path) -> bytes:
    """Content of a file; empty where there is none.

    Raises:
        ConfigError: it cannot be read; names it.
    """
    try:
        with open_file(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):  # the latter below /proc
        return b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _ask(command: list[str], jobs: list[str]) -> dict[str, str] | None:
    """State by job id; None where the command fails, or is not installed."""
    try:
        done = subprocess.run(
            [*command, f"--jobs={','.join(jobs)}"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    answers = (line.split("|") for line in done.stdout.splitlines())
    return {job: state.split()[0].lower() for job, state in answers}  # "CANCELLED by 1000"
