"""Sandbox for programs written by the model. docs/sandbox.md says what is isolated, and how."""

from __future__ import annotations

from gapo_megatron.isolation import SYSTEM_PYTHON, Kind, split_setting
from gapo_megatron.rewards.sandbox.base import (
    START_TIMEOUT_S,
    Limits,
    ProgramError,
    Sandbox,
    SandboxError,
)
from gapo_megatron.rewards.sandbox.process import ProcessSandbox
from gapo_megatron.rewards.sandbox.service import QUEUE_TIMEOUT_S, ServiceSandbox


def start_sandbox(limits: Limits, *, sandbox: str, python: str, is_second: bool = False) -> Sandbox:
    """Start a sandbox, to be used in this thread. The first message waits until it is ready.

    Args:
        limits: limits of the program.
        sandbox: `reward.sandbox` of the config.
        python: interpreter of the programs; a service has its own.
        is_second: whether the same program already has a sandbox. It waits for this one, so a
            service must not make this one queue behind other programs.

    Raises:
        SandboxError: the sandbox does not start; the first message may raise it too.
    """
    kind, place = split_setting(sandbox)
    if kind == "service":
        return ServiceSandbox(limits, address=place, is_second=is_second)
    return ProcessSandbox(limits, kind=kind, python=python, image=place)


def start_timeout_s(sandbox: str) -> float:
    """Most wall-clock seconds for the two sandboxes of a program to start, including a queue."""
    queue_s = QUEUE_TIMEOUT_S if split_setting(sandbox)[0] == "service" else 0.0
    return queue_s + 2 * START_TIMEOUT_S


__all__ = [
    "SYSTEM_PYTHON",
    "Kind",
    "Limits",
    "ProgramError",
    "Sandbox",
    "SandboxError",
    "split_setting",
    "start_sandbox",
    "start_timeout_s",
]
