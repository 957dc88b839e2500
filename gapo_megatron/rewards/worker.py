"""The process that runs a verifier: `python -m gapo_megatron.rewards.worker MODULE OPTIONS`.

Standard input is a socket to the pool. Lines of JSON come in as (index, response, answer) and go
out as (index, outcome, reason). The pool copes with a worker that hangs or dies at any time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable

from gapo_megatron.rewards.pool import READY, SIGNALS_LEFT_TO_TRAINER
from gapo_megatron.types import Outcome, Verdict

MEMORY_BYTES = 4 * 2**30
"""Address space of a worker, about ten times what it needs: huge values raise MemoryError."""

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
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    module, options = sys.argv[1:]
    verify = functools.partial(importlib.import_module(module).verify, **json.loads(options))
    # Discard what a verifier prints, such as thousands of parser warnings. The channel stays a bare
    # file descriptor, which only the end of the process closes.
    channel = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    _send(channel, READY)
    with os.fdopen(os.dup(channel), "rb") as lines:
        for line in lines:
            index, response, answer = json.loads(line)
            verdict = _judge(verify, response, answer)
            reason = verdict.reason[:_MAX_REASON_CHARACTERS]
            _send(channel, json.dumps([index, verdict.outcome, reason]).encode() + b"\n")


def _judge(verify: Callable[[str, str], Verdict], response: str, answer: str) -> Verdict:
    try:
        return verify(response, answer)
    except Exception as error:  # on hostile input sympy may raise anything
        return Verdict(Outcome.UNKNOWN, f"{type(error).__name__}: {error}")


def _send(channel: int, data: bytes) -> None:
    while data:
        data = data[os.write(channel, data) :]


if __name__ == "__main__":
    main()
