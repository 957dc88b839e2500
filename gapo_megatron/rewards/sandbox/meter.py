"""What a program has used of its time, seen from outside: a busy machine takes none of it."""

from __future__ import annotations

import random

from gapo_megatron.rewards.processes import can_run, cpu_seconds, descendants

_LOOK_S = (0.1, 0.4)
"""Seconds between two looks: at random, so that no program computes at the looks alone."""


class Meter:
    """Wall-clock time in which the processes of a sandbox wait, CPU time in which they compute.

    Looks tell which. Where a process can run, what counts is the CPU time since the last look, and
    no more than the wall-clock time. None can be kept from running but by the machine: a program
    may not change its priority (`seccomp`), and one that lowers its group's counts as asleep.
    """

    def __init__(self, pid: int) -> None:
        """Begin with nothing.

        Args:
            pid: the process that we started, ancestor of all others of the sandbox.
        """
        self._pid = pid
        self._cpu_s = 0.0
        self._waited_s = 0.0
        self.next_look_s = random.uniform(*_LOOK_S)
        """Seconds of waiting until the next look."""

    def wait(self, seconds: float) -> None:
        """The judge has waited so long for the sandbox."""
        self._waited_s += seconds
        self.next_look_s = max(0.0, self.next_look_s - seconds)

    def look(self) -> float:
        """Seconds that the sandbox used of those waited since the last look.

        To be called while the judge waits: between two tests no process of the program is there.
        """
        processes = [str(self._pid), *descendants(self._pid)]
        seconds = sum(map(cpu_seconds, processes))
        used_s = self._waited_s
        if any(map(can_run, processes)):
            used_s = min(used_s, max(0.0, seconds - self._cpu_s))
        self._cpu_s = max(seconds, self._cpu_s)
        self._waited_s, self.next_look_s = 0.0, random.uniform(*_LOOK_S)
        return used_s


__all__ = ["Meter"]
