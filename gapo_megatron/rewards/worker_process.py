"""The pool's side of a worker process: what it judges, for how long it has, and how it ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gapo_megatron.rewards.processes import cpu_s, cpu_s_of_all
from gapo_megatron.rewards.results import read_grade, read_metrics
from gapo_megatron.types import Outcome, Verdict

START_TIMEOUT_S = 300.0
"""Time for a worker to import its verifier, usually a second; measured as `timeout_s` of `Pool`."""

LOOK_S = 0.5
"""Seconds between two checks of a worker's CPU time; it may exceed its limit by this much."""

LEAST_SHARE = 0.01
"""Share of a CPU. A worker that uses less, with all its child processes, counts as hanging."""

GRACE_S = 5.0
"""Time beyond the limit in which a worker must say that a call of an async verifier has exceeded
it; one that does not is blocked by a coroutine that never waits."""

READY = b"ready\n"
"""First message of a worker, once its verifier is imported."""

SIGNALS_LEFT_TO_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends them to every process of a job. Workers start with them blocked, and ignore them."""

MAX_REPLY_BYTES = 64 * 1024
"""Largest reply of a worker on a response."""


class Item(NamedTuple):
    """A response to judge; in a worker's hands also all responses to a prompt, as a list."""

    response: Any
    """A text of `marked_text`; or a list of them, of one prompt."""
    answer: str
    verifier: str = ""
    """Name of one of the pool's `others`; empty: its main verifier."""
    row: Mapping[str, Any] = MappingProxyType({})
    """Other columns of the problem's row; JSON values."""
    extras: Mapping[str, Any] = MappingProxyType({})
    """Values of `verifiers.EXTRAS`; of a list of responses, a list of them by name."""
    group: str | None = None
    """What a verifier that compares gets in one call: the items of a `submit` with the same group,
    which have the same answer. None: alone."""

    @property
    def num_responses(self) -> int:
        """1, or the number in the list."""
        return len(self.response) if isinstance(self.response, list) else 1


class Worker:
    """One worker process: starting, free, or busy with calls."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Any,
        folder: str,
        with_grace: Collection[str] = (),
    ) -> None:
        """Start it. `with_grace`: names of async verifiers, which keep their limits themselves."""
        self._with_grace = with_grace
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
        self.items: dict[int, Item] = {}
        """Calls that it judges, by number; empty while it is idle."""
        self.first: list[tuple[int, Item]] = []
        """Calls that it must judge first, one at a time, as the worker before it could not."""
        self.is_alone = False
        """Whether what it judges is one of them."""
        self.is_fresh = True
        """Whether it has judged nothing yet."""
        self.verdicts: dict[int, list[Verdict]] = {}
        """Verdicts of calls that have ended."""
        self.ignored: list[str] = []
        """Metrics that it has left out, and why."""
        self.failure = ""
        """Why the worker must be replaced; empty while it works."""
        self.outbox = memoryview(b"")
        self._inbox = bytearray()
        self._limits: dict[int, float] = {}
        self.limit(START_TIMEOUT_S)

    def take(self, index: int, item: Item, *, timeout_s: float) -> None:
        """Assign a call; `send` transfers it."""
        grace_s = GRACE_S if item.verifier in self._with_grace else 0.0
        self.items[index], self._limits[index] = item, timeout_s + grace_s
        self.limit(min(self._limits.values()))
        document = [index, item.verifier, item.response, item.answer, dict(item.row)]
        line = json.dumps([*document, dict(item.extras), timeout_s]).encode() + b"\n"
        self.outbox = memoryview(bytes(self.outbox) + line)

    def rest(self) -> None:
        """Become free."""
        self.items, self.deadline = {}, math.inf

    def hand_over(self) -> dict[int, list[Verdict]]:
        """The verdicts since the last call; the time of the calls that go on starts again."""
        found, self.verdicts = self.verdicts, {}
        for number in found:
            del self.items[number], self._limits[number]
        if found:
            self.is_fresh = False
            if self.items:
                self.limit(min(self._limits.values()))
            else:
                self.rest()
        return found

    def limit(self, limit_s: float) -> None:
        """Allow this many seconds from now: of CPU time, and of wall-clock time without any."""
        self.limit_s = limit_s
        # Without its child processes, which take longer to look at.
        self._cpu_s_before = self._cpu_s_seen = cpu_s(self.process.pid)
        self._computed_at = time.monotonic()
        self._set_deadline()

    def look(self) -> None:
        """Measure its CPU time; set `failure` if the time is over."""
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
        if not self.failure:
            self._set_deadline()
        elif len(self.items) == 1:  # otherwise nobody knows which of them it was
            self.blame()

    def blame(self) -> None:
        """Make its failure the verdict on everything that it judges."""
        for number, item in self.items.items():
            self.verdicts[number] = [Verdict(Outcome.UNKNOWN, self.failure)] * item.num_responses

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
        """Send and receive as much as possible without waiting; set `verdicts` or `failure`."""
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
        most = MAX_REPLY_BYTES * max(sum(item.num_responses for item in self.items.values()), 1)
        if not received:
            self.failure = f"the verifier crashed ({self.kill()})"
        elif len(self._inbox) > most:
            self.failure = f"the verifier sent more than {most} bytes"
        while not self.failure and b"\n" in self._inbox:
            line, _, rest = bytes(self._inbox).partition(b"\n")
            self._inbox = bytearray(rest)
            self._read(line + b"\n")

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
        """Handle a line: ready, or the verdicts on one of its calls."""
        if line == READY and not self.is_ready:
            self.is_ready = True
            self.rest()
            return
        try:
            index, found, ignored = json.loads(line)
            verdicts = [_verdict(*one) for one in found]
        except (ValueError, TypeError, RecursionError, AttributeError):
            index, verdicts, ignored = None, [], ""
        item = self.items.get(index)
        if item is None or index in self.verdicts or len(verdicts) != item.num_responses:
            self.failure = "the verifier sent something other than its verdict"
            self.verdicts.clear()
            return
        self.verdicts[index] = verdicts
        self.ignored += [str(ignored)] if ignored else []


def _verdict(outcome: Any, reason: Any, grade: Any, answer: Any, metrics: Any) -> Verdict:
    """A verdict from a worker's reply; raises ValueError or TypeError if it is none."""
    grade = None if grade is None else read_grade(grade)
    return Verdict(Outcome(outcome), str(reason), grade, str(answer), read_metrics(metrics))
