"""The process that runs verifiers: `python -m gapo_megatron.rewards.worker SETTINGS`.

Standard input is a socket to the pool. Lines of JSON come in as (index, verifier, response, answer,
row, extras, limit in seconds) and go out as (index, verdicts, ignored): a verdict is (outcome,
reason, grade, answer, metrics), and `ignored` a text on a metric that was left out, or empty. With
a list of responses, extras are lists too. The pool copes with a worker that hangs or dies at any
time.

Verifiers that are `async` share an event loop (`event_loop`), in which each call has its own limit.
All others are called one at a time, and their limits are the pool's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from json import dumps, loads
from typing import Any

from gapo_megatron import user_code
from gapo_megatron.rewards import verifiers
from gapo_megatron.rewards.verifiers import Question, run_at_once
from gapo_megatron.rewards.worker_process import READY, SIGNALS_LEFT_TO_TRAINER
from gapo_megatron.types import Verdict

MEMORY_BYTES = 4 * 2**30
"""Address space of a worker, about ten times what it needs: huge values raise MemoryError. Code of
the user's own, which may import any library, has `OWN_MEMORY_BYTES`; beside it, what a verifier of
this package may add to what the worker has."""

OWN_MEMORY_BYTES = 8 * MEMORY_BYTES

MOST_OUTPUT_BYTES = 16 * 2**20
"""Size from which the file with what verifiers print gets no more."""

MOST_IGNORED = 100
"""Entries of mappings that a worker says it has left out; it says each once."""

_MAX_REASON_CHARACTERS = 500
_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Serve until standard input ends."""
    # End with the trainer, leave its signals to it, and limit memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in SIGNALS_LEFT_TO_TRAINER:
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, children do not inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_LEFT_TO_TRAINER)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit codes of children are lost
    settings = loads(sys.argv[1])
    own = {name for name, (code, _) in settings["verifiers"].items() if user_code.is_code(code)}
    _limit_memory(OWN_MEMORY_BYTES if own else MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    loaded = {
        name: verifiers.load(code, options, setting="the verifier")
        for name, (code, options) in settings["verifiers"].items()
    }
    # What its own verifiers print is for the user; those of this package print thousands of parser
    # warnings. The channel stays a bare file descriptor, which only the end of the process closes.
    channel = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    output = os.open(settings["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    judges = _Judges(loaded, own, channel, (output, nowhere), settings["correct_above"])
    _send(channel, READY)
    if any(one.is_async for one in loaded.values()):
        from gapo_megatron.rewards.event_loop import EventLoop  # others start without asyncio

        EventLoop(
            channel,
            is_async=lambda name: loaded[name].is_async,
            answer=judges.answer,
            judge=judges.judge_later,
            reply=judges.reply,
        ).serve()
    with os.fdopen(os.dup(channel), "rb") as lines:
        for line in lines:
            judges.answer(loads(line))


class _Judges:
    """The verifiers of this process, and its way to the pool."""

    def __init__(
        self,
        loaded: Mapping[str, verifiers.Verifier],
        own: set[str],
        channel: int,
        outputs: tuple[int, int],
        correct_above: float,
    ) -> None:
        self.loaded = loaded
        self.channel = channel
        self._own = own
        self._outputs = outputs
        self._correct_above = correct_above
        self._ignored: list[str] = []
        """What was left out, and why, and has not been said yet."""
        self._said: set[str] = set()

    def answer(self, call: Sequence[Any]) -> None:
        """Judge, with a verifier that is not async."""
        self._prepare(call[1])
        verdicts = run_at_once(self._judge(call))
        signal.setitimer(signal.ITIMER_REAL, 0)  # its alarm must not end another's judgement
        self.reply(call, verdicts)

    async def judge_later(self, call: Sequence[Any]) -> list[Verdict]:
        """Judge, with a verifier that is async."""
        self._prepare(call[1])
        return await self._judge(call)

    async def _judge(self, call: Sequence[Any]) -> list[Verdict]:
        _, name, responses, answer, row, extras, _ = call
        if isinstance(responses, list):
            each = [
                {key: values[i] for key, values in extras.items()} for i in range(len(responses))
            ]
            questions = [*map(Question, responses, each)]
        else:
            questions = [Question(responses, extras)]
        return await self.loaded[name].judge_all(
            questions,
            answer,
            row,
            correct_above=self._correct_above,
            ignore=self._ignore,
        )

    def _ignore(self, why: str) -> None:
        if why not in self._said and len(self._said) < MOST_IGNORED:
            self._said.add(why)
            self._ignored.append(why)

    def _prepare(self, name: str) -> None:
        """Limit the memory for a verifier, and choose where it prints."""
        output, nowhere = self._outputs
        if self._own:
            limit = OWN_MEMORY_BYTES if name in self._own else _address_space() + MEMORY_BYTES
            _limit_memory(limit)
        has_room = os.fstat(output).st_size < MOST_OUTPUT_BYTES
        for standard in (1, 2):
            os.dup2(output if name in self._own and has_room else nowhere, standard)

    def reply(self, call: Sequence[Any], verdicts: Sequence[Verdict]) -> None:
        """Send the verdicts on a call."""
        most = _MAX_REASON_CHARACTERS
        texts = [
            (one.outcome, str(one.reason)[:most], one.grade, str(one.answer)[:most], one.metrics)
            for one in verdicts
        ]
        why = self._ignored.pop(0) if self._ignored else ""  # others follow
        _send(self.channel, dumps([call[0], texts, why]).encode() + b"\n")


def _limit_memory(num_bytes: int) -> None:
    """Set the soft limit, which may rise again."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Bytes that this process has, libraries of the user's code included."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _send(channel: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(channel, data) :]
        except BlockingIOError:  # an event loop has made it so
            select.select([], [channel], [])


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the trainer has ended
        main()
