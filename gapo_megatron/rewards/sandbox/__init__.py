"""Sandbox for programs written by the model. docs/sandbox.md says what is isolated, and how."""

from __future__ import annotations

from gapo_megatron.isolation import REMOTE, SYSTEM_PYTHON, Kind, split_setting
from gapo_megatron.rewards.sandbox.base import (
    START_TIMEOUT_S,
    Limits,
    ProgramError,
    Sandbox,
    SandboxError,
)
from gapo_megatron.rewards.sandbox.process import ProcessSandbox
from gapo_megatron.rewards.sandbox.remote import QUEUE_TIMEOUT_S, RemoteSandbox


def start_sandbox(
    limits: Limits, *, sandbox: str, python: str, hangup: int | None = None
) -> Sandbox:
    """Start a sandbox, to be used in this thread. The first message waits until it is ready.

    Args:
        limits: limits of the program.
        sandbox: `reward.sandbox` of the config.
        python: interpreter of the programs; a service has its own.
        hangup: see `ProcessSandbox`.

    Raises:
        SandboxError: the sandbox does not start; the first message may raise it too.
    """
    kind, place = split_setting(sandbox)
    if kind in REMOTE:
        return RemoteSandbox(limits, sandbox=sandbox)
    return ProcessSandbox(limits, kind=kind, python=python, image=place, hangup=hangup)


def run_once(program: str, *, limits: Limits, sandbox: str, python: str) -> tuple[str, str]:
    """Run a program without input; returns its standard output, and how it failed (or "").

    Raises:
        SandboxError: the sandbox failed.
    """
    try:
        with start_sandbox(limits, sandbox=sandbox, python=python) as box:
            box.send({"program": program, "prelude": ""})
            reply = box.ask({"stdin": ""})
    except ProgramError as error:
        return "", str(error)
    return str(reply["stdout"]), str(reply["failure"] or "")


def start_timeout_s(sandbox: str) -> float:
    """Most wall-clock seconds for the two sandboxes of a program to start, including a queue."""
    queue_s = QUEUE_TIMEOUT_S if split_setting(sandbox)[0] in REMOTE else 0.0
    return queue_s + 2 * START_TIMEOUT_S


__all__ = [
    "REMOTE",
    "START_TIMEOUT_S",
    "SYSTEM_PYTHON",
    "Kind",
    "Limits",
    "ProgramError",
    "Sandbox",
    "SandboxError",
    "run_once",
    "split_setting",
    "start_sandbox",
    "start_timeout_s",
]
