"""A sandbox for programs that nobody has read: walls around a process of ours.

What is isolated, how, and what is not: docs/sandbox.md.
"""

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
    """Start a sandbox, to be used in this thread; the first message waits until it answers.

    Args:
        limits: of the program.
        sandbox: `reward.sandbox` of the config.
        python: interpreter of the programs; a service has its own.
        is_second: of the same program, which has one already. The first would wait for it, so a
            service does not make it queue.

    Raises:
        SandboxError: it does not start. So does the first message.
    """
    kind, place = split_setting(sandbox)
    if kind == "service":
        return ServiceSandbox(limits, address=place, is_second=is_second)
    return ProcessSandbox(limits, kind=kind, python=python, image=place)


def start_timeout_s(sandbox: str) -> float:
    """Wall-clock seconds that the two sandboxes of a program may take to start, with the queue."""
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
