"""The process that runs verifiers: `python -m gapo_megatron.rewards.worker SETTINGS`.

Standard input is a socket to the pool. Lines of JSON come in as (index, verifier, response, answer,
row) and go out as (index, outcome, reason, grade). The pool copes with a worker that hangs or dies
at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from json import dumps, loads

from gapo_megatron import user_code
from gapo_megatron.rewards import verifiers
from gapo_megatron.rewards.pool import READY, SIGNALS_LEFT_TO_TRAINER

MEMORY_BYTES = 4 * 2**30
"""Address space of a worker, about ten times what it needs: huge values raise MemoryError. Code of
the user's own, which may import any library, has `OWN_MEMORY_BYTES`; beside it, what a verifier of
this package may add to what the worker has."""

OWN_MEMORY_BYTES = 8 * MEMORY_BYTES

MOST_OUTPUT_BYTES = 16 * 2**20
"""Size from which the file with what verifiers print gets no more."""

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
    _send(channel, READY)
    with os.fdopen(os.dup(channel), "rb") as lines:
        for line in lines:
            index, name, response, answer, row = loads(line)
            if own:
                _limit_memory(OWN_MEMORY_BYTES if name in own else _address_space() + MEMORY_BYTES)
            has_room = os.fstat(output).st_size < MOST_OUTPUT_BYTES
            for standard in (1, 2):
                os.dup2(output if name in own and has_room else nowhere, standard)
            verdict = loaded[name].judge(
                response, answer, row, correct_above=settings["correct_above"]
            )
            signal.setitimer(signal.ITIMER_REAL, 0)  # its alarm must not end another's judgement
            reason = str(verdict.reason)[:_MAX_REASON_CHARACTERS]
            found = str(verdict.answer)[:_MAX_REASON_CHARACTERS]
            reply = dumps([index, verdict.outcome, reason, verdict.grade, found])
            _send(channel, reply.encode() + b"\n")


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
        data = data[os.write(channel, data) :]


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):  # the trainer has ended
        main()
