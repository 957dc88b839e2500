"""Worker processes that judge responses, so that no verifier can stop the trainer.

Workers are subprocesses (never forks: the trainer holds GPU and engine), each connected by a socket
pair. The parent measures time: CPU time while a worker computes, so that a busy machine changes no
verdict, and wall-clock time while it does not. A worker that hangs, crashes or sends malformed
replies is killed and replaced; the verdict on its item is unknown, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from gapo_megatron.errors import RewardError, printable
from gapo_megatron.rewards.processes import cpu_s, cpu_s_of_all
from gapo_megatron.rewards.verifiers import read_grade
from gapo_megatron.types import Outcome, Verdict

START_TIMEOUT_S = 300.0
"""Time for a worker to import its verifier, usually a second; measured as `timeout_s` of `Pool`."""

LOOK_S = 0.5
"""Seconds between two checks of a worker's CPU time; it may exceed its limit by this much."""

LEAST_SHARE = 0.01
"""Share of a CPU. A worker that uses less, with all its child processes, counts as hanging."""

MAX_FAILED_STARTS = 3
"""Failed starts in a row that are tolerated: a starting worker may be killed by chance."""

QUESTION_S = 5.0
"""Seconds between two calls of `may_end` in `collect`."""

READY = b"ready\n"
"""First message of a worker, once its verifier is imported."""

SIGNALS_LEFT_TO_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends them to every process of a job. Workers start with them blocked, and ignore them."""

MAX_REPLY_BYTES = 64 * 1024
"""Largest reply of a worker."""


class Item(NamedTuple):
    """A response to judge."""

    response: str
    answer: str
    verifier: str = ""
    """Name of one of the pool's `others`; empty: its main verifier."""
    row: Mapping[str, Any] = MappingProxyType({})
    """Other columns of the problem's row; JSON values."""


class Pool:
    """A fixed number of worker processes, kept until `close`. No collectives.

    Create and use it in the main thread: the kernel ends a worker with the thread that started it,
    and so with the trainer, however that ends. Workers ignore signals (Ctrl-C, Slurm's warning).
    """

    def __init__(
        self,
        verifier: str,
        *,
        num_workers: int,
        timeout_s: float,
        options: Mapping[str, Any] = {},
        others: Mapping[str, tuple[str, float, Mapping[str, Any]]] = {},
        correct_above: float = 0.5,
        columns: Mapping[str, Collection[str] | None] = MappingProxyType({}),
        output: Path | None = None,
    ) -> None:
        """Start the workers without waiting until they have imported the verifiers.

        Args:
            verifier: name as of `verifiers.load`. Only workers import it; it should import neither
                torch nor transformers.
            num_workers: number of processes.
            timeout_s: limit for one item, counted from when a worker has received all of it: in
                seconds of CPU time, and of wall-clock time without CPU time.
            options: further keyword arguments of `verify`; JSON values.
            others: further verifiers, by the name that items give: (verifier, timeout_s, options).
            correct_above: see `verifiers.to_verdict`.
            columns: what a worker gets of an item's row, by the name that items give; None, or
                without the name: all of it.
            output: file to which is appended what the user's own verifiers print, and the first
                traceback of every place where a verifier raises; None: nowhere.
        """
        assert num_workers > 0, f"num_workers ({num_workers}) must be positive"
        self.verifier = verifier
        self._verifiers = {"": (verifier, timeout_s, options), **others}
        settings = {
            "verifiers": {name: (code, opts) for name, (code, _, opts) in self._verifiers.items()},
            "correct_above": correct_above,
            "output": str(output or os.devnull),
        }
        command = [sys.executable, "-um", "gapo_megatron.rewards.worker", json.dumps(settings)]
        # Later workers start where these do: paths of verifiers are relative to the folder.
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        self._start = partial(_Worker, command, variables=variables, folder=os.getcwd())
        self._workers = [self._start() for _ in range(num_workers)]
        self._num_failed_starts = 0
        self._columns = columns
        self._next_index = 0  # never reused: a late verdict must not count for another item
        self._waiting: deque[tuple[int, Item]] = deque()
        self._open: set[int] = set()
        """Items submitted and not judged yet."""
        self._verdicts: dict[int, Verdict] = {}

    def wait_until_ready(self) -> None:
        """Wait for the start of every worker, before expensive work. Raises as `poll`."""
        self._settle()
        while not all(worker.is_ready for worker in self._workers):
            self._wait(math.inf)
            self._settle()

    def judge(
        self, items: Iterable[tuple[Any, ...]], *, may_end: Callable[[bool], bool] = bool
    ) -> list[Verdict]:
        """Submit items and wait for their verdicts: `submit` and `collect` in one call."""
        return self.collect(self.submit(items), may_end=may_end)

    def submit(self, items: Iterable[tuple[Any, ...]]) -> list[int]:
        """Queue the items, each the arguments of `Item`; `poll` and `collect` hand them out.

        Returns:
            The numbers of the items, for `collect`.
        """
        queued = [Item(*one) for one in items]
        for place, item in enumerate(queued):
            taken = self._columns.get(item.verifier)
            if taken is not None:  # rows may be large: only what the verifier takes
                row = {key: one for key, one in item.row.items() if key in taken}
                queued[place] = item._replace(row=row)
        numbers = list(range(self._next_index, self._next_index + len(queued)))
        self._next_index += len(queued)
        self._waiting.extend(zip(numbers, queued, strict=True))
        self._open.update(numbers)
        return numbers

    def poll(self) -> None:
        """Receive finished verdicts and give each free worker an item. Never waits.

        Call it often during other work: workers get items only here and in `collect`.

        Raises:
            RewardError: workers cannot start; their own error is on stderr.
        """
        # Before items are given out: an idle worker may have been killed.
        settled = self._settle()
        self._verdicts |= settled
        self._open -= settled.keys()
        for worker in self._workers:
            is_free = worker.is_ready and worker.item is None
            if is_free and (worker.first or self._waiting):
                number, item = worker.first or self._waiting.popleft()
                worker.first = None
                _, timeout_s, _ = self._verifiers[item.verifier]
                worker.take(number, item, timeout_s=timeout_s)
                worker.send()

    def collect(
        self, numbers: Sequence[int], *, may_end: Callable[[bool], bool] = bool
    ) -> list[Verdict]:
        """Wait for the verdicts on these items, and drop everything else submitted so far.

        Args:
            numbers: numbers of items submitted since the last `collect`.
            may_end: called every few seconds with whether all items are judged; once they are,
                `collect` returns when it answers True. An exception of it aborts the wait; the pool
                stays usable.

        Returns:
            One verdict per item, in order; unknown, with the reason, where the worker failed.

        Raises:
            RewardError: as `poll`.
        """
        wanted = set(numbers)
        self._open &= wanted
        self._waiting = deque(one for one in self._waiting if one[0] in wanted)
        next_question = time.monotonic() + QUESTION_S
        try:
            self.poll()
            while self._open:
                self._wait(next_question)
                self.poll()
                if time.monotonic() >= next_question:
                    may_end(False)
                    next_question = time.monotonic() + QUESTION_S
            while not may_end(True):
                pass
            return [self._verdicts[number] for number in numbers]
        finally:
            self._open.clear()
            self._waiting.clear()
            self._verdicts.clear()

    def close(self) -> None:
        """Kill the workers and wait for their end. May be called twice."""
        while self._workers:
            self._workers.pop().kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, until: float) -> None:
        """Wait until a worker sends, can receive, or is due for a check, or until `until`."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                writes = selectors.EVENT_WRITE if worker.outbox else 0
                selector.register(worker.channel, selectors.EVENT_READ | writes)
            deadline = min(until, *(worker.deadline for worker in self._workers))
            selector.select(max(0.0, deadline - time.monotonic()))

    def _settle(self) -> dict[int, Verdict]:
        """Receive finished verdicts, by number of the item, and replace failed workers."""
        verdicts = {}
        for place, worker in enumerate(self._workers):
            worker.exchange()  # before the check of its time: its reply may have come long ago
            if not worker.failure and not worker.verdict and time.monotonic() > worker.deadline:
                worker.look()
            if worker.failure and worker.is_fresh:
                worker.verdict = Verdict(Outcome.UNKNOWN, worker.failure)
            if worker.verdict and worker.item:
                number, item = worker.item
                verdicts[number] = self._named(worker.verdict, item)
            if worker.failure:
                self._replace(place)
            elif worker.verdict:
                worker.rest()
                worker.is_fresh = False
        return verdicts

    def _named(self, verdict: Verdict, item: Item) -> Verdict:
        """The verdict with a reason for a message; if unknown, it names the verifier."""
        reason = printable(verdict.reason, most=MAX_REPLY_BYTES)
        if verdict.outcome is Outcome.UNKNOWN:
            name, _, _ = self._verifiers[item.verifier]
            reason = f"{name.removeprefix(f'{__package__}.')}: {reason}"
        return replace(verdict, reason=reason)

    def _replace(self, place: int) -> None:
        worker = self._workers[place]
        worker.kill()
        self._num_failed_starts = 0 if worker.is_ready else self._num_failed_starts + 1
        if self._num_failed_starts > MAX_FAILED_STARTS:
            raise RewardError(f"a worker for {self.verifier} cannot start: {worker.failure}")
        self._workers[place] = self._start()
        # What an earlier item has left behind may have broken the worker: judge this one again.
        self._workers[place].first = worker.first or (None if worker.verdict else worker.item)


class _Worker:
    """The parent's side of one worker process: starting, free, or busy with one item."""

    def __init__(self, command: Sequence[str], *, variables: Any, folder: str) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_LEFT_TO_TRAINER)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    env=variables,
                    cwd=folder,
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.is_ready = False
        self.item: tuple[int, Item] | None = None
        """Number and item that it judges; None while idle."""
        self.first: tuple[int, Item] | None = None
        """The item that it must judge first, as the worker before it could not."""
        self.is_fresh = True
        """Whether it has judged nothing yet."""
        self.limit(START_TIMEOUT_S)
        self.verdict: Verdict | None = None
        self.failure = ""
        """Why the worker must be replaced; empty while it works."""
        self.outbox = memoryview(b"")
        self._inbox = bytearray()

    def take(self, index: int, item: Item, *, timeout_s: float) -> None:
        """Assign an item; `send` transfers it."""
        self.item = index, item
        self.limit(timeout_s)
        document = [index, item.verifier, item.response, item.answer, dict(item.row)]
        self.outbox = memoryview(json.dumps(document).encode() + b"\n")

    def rest(self) -> None:
        """Become free."""
        self.item, self.verdict, self.deadline = None, None, math.inf

    def limit(self, limit_s: float) -> None:
        """Allow this many seconds from now: of CPU time, and of wall-clock time without any."""
        self.limit_s = limit_s
        # Without its child processes, which take longer to look at.
        self._cpu_s_before = self._cpu_s_seen = cpu_s(self.process.pid)
        self._computed_at = time.monotonic()
        self._set_deadline()

    def look(self) -> None:
        """Measure its CPU time; set `failure` and `verdict` if the time is over."""
        pid, now = self.process.pid, time.monotonic()
        own_s, all_s = cpu_s(pid), cpu_s_of_all(pid)
        computed_s, passed_s = all_s - self._cpu_s_seen, now - self._computed_at
        if computed_s > 0 and computed_s >= LEAST_SHARE * passed_s:
            self._cpu_s_seen, self._computed_at = all_s, now
        if own_s - self._cpu_s_before > self.limit_s:
            self.failure = f"took more than {self.limit_s:g} s of CPU time"
        elif now - self._computed_at > self.limit_s:
            self.failure = (
                f"used less than {LEAST_SHARE:.0%} of a CPU for more than {self.limit_s:g} s"
            )
        if self.failure:
            self.verdict = Verdict(Outcome.UNKNOWN, self.failure)
        else:
            self._set_deadline()

    def _set_deadline(self) -> None:
        """Set the time of the next check: every `LOOK_S`, or when a sleeping worker times out."""
        self.deadline = min(time.monotonic() + LOOK_S, self._computed_at + self.limit_s)

    def send(self) -> None:
        """Send as much as possible without waiting."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            if self.outbox:
                self.outbox = self.outbox[self.channel.send(self.outbox) :]
                # Its time starts again: it could not judge before it had all of the item.
                self.limit(self.limit_s)

    def exchange(self) -> None:
        """Send and receive as much as possible without waiting; set `verdict` or `failure`."""
        if self.failure:
            return
        self.send()
        try:
            received = self.channel.recv(MAX_REPLY_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            received = b""
        self._inbox += received
        if not received:
            self.failure = f"the verifier crashed ({self.kill()})"
        elif len(self._inbox) > MAX_REPLY_BYTES:
            self.failure = f"the verifier sent more than {MAX_REPLY_BYTES} bytes"
        elif self._inbox.endswith(b"\n"):
            self._read(bytes(self._inbox))
            self._inbox.clear()

    def kill(self) -> str:
        """Kill the process and its children, wait for it, and say how it ended."""
        self.channel.close()
        if self.process.returncode is None:  # otherwise its pid may belong to another process
            # Does not change the exit code of a process that is exiting by itself.
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        names = {-one.value: one.name for one in signal.Signals}  # not of every signal
        return names.get(code, f"signal {-code}") if code < 0 else f"exit code {code}"

    def _read(self, line: bytes) -> None:
        """Handle a line: ready, or the verdict on its item."""
        if line == READY and not self.is_ready:
            self.is_ready = True
            self.rest()
            return
        try:
            index, outcome, reason, grade, answer = json.loads(line)
            grade = None if grade is None else read_grade(grade)
            verdict = Verdict(Outcome(outcome), str(reason), grade, str(answer))
        except (ValueError, TypeError, RecursionError):
            index, verdict = None, None
        if verdict and self.item and index == self.item[0]:
            self.verdict = verdict
        else:
            self.failure = "the verifier sent something other than its verdict"


__all__ = ["Pool"]
