"""Find what failed first: `python -m gapo_megatron.launch.postmortem ATTEMPT_DIR`.

When one rank fails, all ranks fail, and most of their errors are about each other. The attempt's
folder shows which was first:

1. launch.log: srun's messages on how tasks ended, in the order in which it was told, by one clock.
   What follows srun's decision to end the step is a consequence, not a cause. lost.log has the same
   of ranks that generate, without which the others went on; it is read after launch.log.
2. failure_R.json: what rank R raised, and when. Clocks of nodes differ, so times are compared only
   within one line of launch.log (tasks of one node), or if launch.log has no such line.
3. rank_R.log: the stacks of a process that hung, or was ended because another one failed.

A communication error (connection closed, peer not answering) is a symptom: it counts only if no
rank has another error. Such ranks can be first in launch.log: in a hang all others give up before
the stuck rank is ended, and the news of a killed rank may arrive late.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gapo_megatron.errors import ConfigError, MachineError, printable
from gapo_megatron.io.documents import open_file, read_json
from gapo_megatron.io.files import write_atomically

NEVER_AGAIN = (2, 3)
"""Exit codes that are not worth a retry: wrong config or data; a newer attempt owns the run."""

# What `fail_fast` writes.
_FAILURE = {"rank": int, "exit_code": int, "unix_s": float}
_FAILURE |= dict.fromkeys(("host", "error", "message", "traceback"), str)
_MAX_BYTES = 2**24
_TAIL_BYTES = 2**18
_ABORT_BYTES = 2**14
"""Bytes at the end of a log that are searched for the cause of an abort."""
_MAX_PLACES = 8
_WIDTH = 240
_ENDED = re.compile(
    r"(?:srun: error: (?P<host>\S+): )?tasks? (?P<ranks>[\d,-]+): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<signal>[^:]+?)(?: \(core dumped\))?)"
)
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
_EARLY = re.compile(r"srun: StepId=\S+ (tasks? [\d,-]+): exited")
_STOPPED = re.compile(r"srun: (Job step aborted|got SIGCONT|forcing job termination)")
_ENDING = re.compile(r"srun: .*Terminating StepId")
_REASON = re.compile(r"error: \*\*\* STEP .* CANCELLED AT \S+ DUE TO ([A-Z]+(?: [A-Z]+)*)")
_OUT_OF_MEMORY = re.compile(r".*oom[_-]kill.*", re.IGNORECASE)
_COMMUNICATION = re.compile(
    r"connection (closed|reset|refused)|connectfullmesh|broken pipe|client socket|socket timeout"
    r"|timed out waiting|watchdog caught|remote process exited|nccl (error|communicator)"
    r"|nccl(remote|system)error|dist(network|store)error",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"^Timeout \((.*)\)!$", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+.*\(most recent call first\):$")
_FRAME = re.compile(r'^ *File "(?P<path>.+)", line (?P<line>\d+),? in (?P<function>.+)$')

# Installed packages, the standard library, a checkout or frozen code.
_ABOVE_PACKAGES = re.compile(
    r"^.*/(?:site|dist)-packages/|^.*/lib/python[\d.]+/|^.*/(?=gapo_megatron/)"
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an attempt failed.

    Attributes:
        lines: text for people.
        exit_code: exit code of the rank that failed first; None if it did not exit.
    """

    lines: list[str]
    exit_code: int | None = None

    @property
    def worth_a_retry(self) -> bool:
        return self.exit_code not in NEVER_AGAIN


@dataclass(frozen=True, slots=True)
class End:
    """How one rank ended."""

    rank: int
    host: str = ""
    signal: str = ""
    """Name of the signal as strsignal gives it, or Slurm's `Out Of Memory`."""
    exit_code: int | None = None
    line: float = math.inf
    """Line of launch.log; Slurm reports ranks of one line as ending together."""
    after: str = ""
    """State of srun at that time: `ending` the step for another rank, or `stopped` from outside."""


@dataclass(slots=True)
class LaunchLog:
    """Parsed messages of srun."""

    ends: list[End] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)
    early: str = ""
    """Ranks that ended without an error, long before the others."""
    stopped: bool = False
    """Whether the step was ended from outside: cancelled, preempted, out of time."""
    errors: list[str] = field(default_factory=list)
    """Other errors."""


@dataclass(frozen=True)
class Log:
    """The end of a rank's log."""

    path: Path

    @cached_property
    def text(self) -> str:
        """The log's last 256 KiB; empty if there is no log."""
        return _read(self.path, last_bytes=_TAIL_BYTES)

    @cached_property
    def hang(self) -> str:
        """Time without progress after which this rank gave up, `h:mm:ss`; empty if it did not."""
        found = _TIMEOUT.search(self.text)
        return found[1] if found else ""

    @cached_property
    def stack(self) -> list[str]:
        """Frames of the main thread in faulthandler's last dump, innermost first.

        The dump lists threads from the newest to the oldest; the main thread is last.
        """
        frames: list[str] = []
        in_thread = False
        for line in self.text.splitlines():
            if _THREAD.match(line):
                frames, in_thread = [], True
            elif in_thread and _FRAME.match(line):
                frames.append(line)
            else:
                in_thread = False
        return frames

    def last_lines(self, count: int) -> list[str]:
        """The log's last non-empty lines, indented for printing."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        return [f"  | {line}" for line in lines[-count:]]


class Evidence:
    """The files of an attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        told = [_read(folder / name) for name in ("launch.log", "lost.log")]
        self.launch = read_launch_log("\n".join(told))
        self.failures = _read_failures(folder)
        ranks = {end.rank for end in self.launch.ends} | set(self.failures)
        named = (re.fullmatch(r"rank_(\d+)\.log", path.name) for path in folder.glob("rank_*.log"))
        ranks |= {int(found[1]) for found in named if found}
        self.logs = {rank: Log(folder / f"rank_{rank}.log") for rank in sorted(ranks)}

    def diagnose(self) -> Diagnosis:
        """Find what failed first: a rank with a cause of its own, else what ended all ranks."""
        ends = self._ends_in_order()
        if own := [end for end in ends if self._is_own(end)]:
            return self._describe(own[0])
        # No rank failed by itself: the reason is Slurm's, or the ranks know only of each other.
        reasons = {found[1] for log in self.logs.values() for found in _REASON.finditer(log.text)}
        if self.launch.lost_nodes or "NODE FAILURE" in reasons:
            nodes = ", ".join(self.launch.lost_nodes) or "a node"
            return Diagnosis([f"Slurm lost {nodes}: a node failure, not an error of a rank"])
        if early := self.launch.early:
            lines = [f"{early} ended without an error; srun's --wait then ended the others"]
            return Diagnosis(lines + self._places())
        if self.launch.stopped:
            why = ", ".join(sorted(reasons)).lower() or "cancelled, or preempted"
            return Diagnosis([f"the job was ended from outside: {why}"])
        if ends:
            who, said = self._who(ends[0]), self._error(ends[0].rank) or ends[0].signal
            lines = ["every rank reports only lost connections to others, none an error of its own"]
            return Diagnosis([*lines, f"first to end: {who}: {said}", *self._places()])
        return Diagnosis(
            [
                "the logs do not show what failed",
                *self.launch.errors[:3],
                f"last lines of {self.folder}/rank_0.log:",
                *Log(self.folder / "rank_0.log").last_lines(8),
            ]
        )

    def _ends_in_order(self) -> list[End]:
        """How ranks ended, in order; ranks that srun did not report come last."""
        told = {end.rank for end in self.launch.ends}
        rest = [
            End(rank, exit_code=record["exit_code"] if record else 1)
            for rank, log in self.logs.items()
            if rank not in told and ((record := self.failures.get(rank)) or log.hang)
        ]

        def time(end: End) -> float:
            record = self.failures.get(end.rank)
            return record["unix_s"] if record else math.inf

        return sorted([*self.launch.ends, *rest], key=lambda end: (end.line, time(end)))

    def _is_own(self, end: End) -> bool:
        """Whether a rank ended by itself, not because of another rank or from outside."""
        if end.after == "stopped":
            return False
        is_first = end.line == self.launch.ends[0].line if self.launch.ends else True
        log = self.logs[end.rank]
        if end.signal == "Terminated":
            return is_first
        if end.signal == "Killed":
            # A rank that srun ends because of another one gets SIGTERM first, and logs its stacks.
            return is_first or not log.stack
        said = log.text[-_ABORT_BYTES:] if end.signal else self._error(end.rank)
        return not _COMMUNICATION.search(said)

    def _describe(self, end: End) -> Diagnosis:
        who, log, record = self._who(end), self.logs[end.rank], self.failures.get(end.rank)
        at = [f"  at {place_of(log.stack)}"] if log.stack else []
        where = f"  log: {log.path}"
        if end.signal:
            lines = [f"{who} was ended by a signal: {end.signal}", *self._hints(end), *at, where]
            return Diagnosis(lines + log.last_lines(0 if at else 3))
        if record:
            at = [f"  at {place}"] if (place := self._raised_at(end.rank)) else []
            alike = [rank for rank in self.failures if self._error(rank) == self._error(end.rank)]
            also = [f"  the same on {_shorten(alike)}"] if len(alike) > 1 else []
            lines = [f"{who} failed first: {self._error(end.rank)}", *at, *also, where]
            return Diagnosis(lines, exit_code=record["exit_code"])
        if log.hang:
            lines = [f"hang: no progress for {log.hang}; first to give up: {who}"]
            return Diagnosis(lines + self._places())
        lines = [f"{who} failed first, with exit code {end.exit_code} and no recorded error", where]
        return Diagnosis(lines + log.last_lines(6), exit_code=end.exit_code)

    def _who(self, end: End) -> str:
        host = end.host or self.failures.get(end.rank, {}).get("host")
        return f"rank {end.rank}" + (f" on {host}" if host else "")

    def _error(self, rank: int) -> str:
        record = self.failures.get(rank)
        return f"{record['error']}: {record['message']}" if record else ""

    def _raised_at(self, rank: int) -> str:
        frames = filter(_FRAME.match, self.failures[rank]["traceback"].splitlines())
        return place_of(list(frames)[::-1])

    def _hints(self, end: End) -> list[str]:
        """Messages of slurmstepd about memory, from any rank's log."""
        if end.signal not in ("Killed", "Out Of Memory"):
            return []
        found = (_OUT_OF_MEMORY.search(log.text) for log in self.logs.values())
        told = [f"  {match[0]}" for match in found if match][:1]
        return told or ["  often the kernel, when host memory runs out: see dmesg on that node"]

    def _places(self) -> list[str]:
        """Where every rank was; ranks at the same place share a line, smallest groups first."""
        signals = {end.rank: end.signal for end in self.launch.ends}
        ranks_at: dict[str, list[int]] = {}
        for rank, log in self.logs.items():
            if log.stack:
                place = place_of(log.stack)
            elif record := self.failures.get(rank):
                place = f"{record['error']} in {self._raised_at(rank) or 'an unknown function'}"
            else:
                place = signals.get(rank) or "no stack in its log"
            ranks_at.setdefault(place, []).append(rank)
        places = sorted(ranks_at, key=lambda place: len(ranks_at[place]))
        lines = [f"  {_shorten(ranks_at[place])}: {place}" for place in places[:_MAX_PLACES]]
        more = len(places) - _MAX_PLACES
        return [
            "where the ranks were, smallest groups first:",
            *lines,
            *([f"  and {more} more places"] if more > 0 else []),
            f"  logs: {self.folder}/rank_*.log",
        ]


def read_launch_log(text: str) -> LaunchLog:
    """Parse stderr of srun (Slurm 22.05 to 24.11), or launch.sh's messages in the same form."""
    log = LaunchLog()
    after = ""  # what follows the end of the step is its consequence, not a cause
    for number, line in enumerate(text.splitlines()):
        if found := _ENDED.fullmatch(line):
            name = found["signal"] or ""
            code = int(found["code"]) if found["code"] else None
            if code is not None and code > 128:  # reported by a shell in between
                name = signal.strsignal(code - 128) or f"signal {code - 128}"
                code = None
            log.ends += [
                End(rank, found["host"] or "", name, code, number, after)
                for rank in _parse_ranks(found["ranks"])
            ]
        elif found := _NODE_FAILURE.match(line):
            log.lost_nodes.append(found[1])
        elif found := _EARLY.fullmatch(line):
            log.early = found[1].replace("task", "rank")
            after = "stopped"
        elif _STOPPED.match(line):
            log.stopped = log.stopped or not after
            after = after or "stopped"
        elif _ENDING.match(line):
            after = after or "ending"
        elif "error" in line:
            log.errors.append(line)
    return log


def place_of(frames: Sequence[str]) -> str:
    """`function (file:line)` of the innermost frame, and of the innermost one in this package.

    Args:
        frames: lines of a traceback or of faulthandler, innermost first.
    """
    places = []
    for found in filter(None, map(_FRAME.match, frames)):
        path = _ABOVE_PACKAGES.sub("", found["path"])
        places.append((path, f"{found['function']} ({path}:{found['line']})"))
    ours = [place for path, place in places if path.startswith("gapo_megatron/")]
    return " < ".join(dict.fromkeys([*[place for _, place in places[:1]], *ours[:1]]))


def _parse_ranks(text: str) -> list[int]:
    """`0-2,5` -> 0, 1, 2, 5."""
    spans = (span.split("-") for span in text.split(","))
    return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


def _shorten(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 -> `ranks 0-2,5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ",".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _read_failures(folder: Path) -> dict[int, dict[str, Any]]:
    """Complete records by rank; a full disk leaves incomplete ones."""
    records = {}
    for path in folder.glob("failure_*.json"):
        with contextlib.suppress(ConfigError, FileNotFoundError):  # or a broken link
            record = read_json(path)
            told = record if isinstance(record, dict) else {}
            if all(type(told.get(key)) is kind for key, kind in _FAILURE.items()):
                records[told["rank"]] = told
    return dict(sorted(records.items()))


def _read(path: Path, *, last_bytes: int | None = None) -> str:
    """Text of a file or of its end; empty if it cannot be read."""
    with contextlib.suppress(OSError), open_file(path) as file:
        if last_bytes is not None:
            file.seek(max(os.fstat(file.fileno()).st_size - last_bytes, 0))
        return file.read(_MAX_BYTES).decode(errors="replace")
    return ""


def main(command_line: Sequence[str] | None = None) -> int:
    """Print what failed first, and write its exit code, if any, to the file `exit_code`.

    Returns 0: worth a retry; 4: not worth one; 2: usage. Any other exit code is a failure of this
    program and says nothing about the attempt.
    """
    program = "python -m gapo_megatron.launch.postmortem"
    parser = argparse.ArgumentParser(prog=program, description=f"{__doc__.split(':')[0]}.")
    parser.add_argument(
        "attempt_dir", type=Path, metavar="ATTEMPT_DIR", help="RUN_DIR/attempts/latest, or another"
    )
    folder = parser.parse_args(command_line).attempt_dir
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}")
    diagnosis = Evidence(folder).diagnose()
    for line in diagnosis.lines:
        print(printable(line, most=_WIDTH, kept="\t"))
    if diagnosis.exit_code is not None:
        with contextlib.suppress(MachineError):  # the printed verdict is enough
            write_atomically(folder / "exit_code", str(diagnosis.exit_code))
    return 0 if diagnosis.worth_a_retry else 4


if __name__ == "__main__":
    sys.exit(main())
