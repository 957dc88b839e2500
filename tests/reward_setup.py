"""A verifier that does to its worker what the response says: `Pool("tests.reward_setup", ...)`."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

from gapo_megatron.types import Outcome, Verdict


def verify(response: str, answer: str, *, suffix: str = "") -> Verdict:
    """Obey `response`; whatever is no command is correct."""
    command, _, argument = response.partition(" ")
    match command:
        case "1":
            return Verdict(Outcome.UNKNOWN, "cannot tell")
        case "echo":
            return Verdict(Outcome.WRONG, f"{argument} for {answer}{suffix}")
        case "pid":
            return Verdict(Outcome.CORRECT, str(os.getpid()))
        case "torch":
            return Verdict(Outcome.CORRECT, str("torch" in sys.modules))
        case "child":
            child = subprocess.run([sys.executable, "-c", "exit(3)"], check=False)
            return Verdict(Outcome.CORRECT, str(child.returncode))
        case "sleep":
            time.sleep(float(argument))
        case "compute":
            until = time.process_time() + float(argument)
            while time.process_time() < until:
                pass
        case "await":
            while not os.path.exists(argument):
                time.sleep(0.01)
        case "hang":  # a single instruction: neither a signal's handler nor a thread gets a turn
            all(itertools.repeat(True))
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "print":
            print("[0, 'correct', '']\n" * 100_000, flush=True)
            print("[0, 'correct', '']\n" * 100_000, file=sys.stderr, flush=True)
        case "reason":
            return Verdict(Outcome.WRONG, "x" * 10**6)
        case "flood":
            while True:
                os.write(_channel(), b"x" * 4096)
        case "babble":
            os.write(_channel(), b"hello\n")
        case "nest":
            os.write(_channel(), b"[" * 60_000 + b"\n")
        case "forge":
            os.write(_channel(), b'[0, "correct", ""]\n')
            time.sleep(3600)
    return Verdict(Outcome.CORRECT)


def _channel() -> int:
    """The worker's way to the pool, which no verifier is meant to find."""
    for number in range(3, 100):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                return number
        except OSError:
            continue
    raise AssertionError("no channel")
