"""Measures the time that a program uses, from outside, independently of the machine's load."""

from __future__ import annotations

import random

from gapo_megatron.rewards.processes import can_run, cpu_seconds, descendants

_LOOK_S = (0.1, 0.4)
"""Seconds between two samples; random, so that a program cannot compute between them only."""


class Meter:
    """Counts wall-clock time while the processes of a sandbox wait, and CPU time while they run.

    It samples them. If a process is runnable, the CPU time since the last sample counts, at most
    the wall-clock time. A runnable process waits for a CPU only because the machine is busy: a
    program cannot change its priority (`seccomp`), and a lowered autogroup counts as waiting.
    """

    def __init__(self, pid: int) -> None:
        """Start at zero.

        Args:
            pid: the process that we started, ancestor of all others in the sandbox.
        """
        self._pid = pid
        self._cpu_s = 0.0
        self._waited_s = 0.0
        self.next_look_s = random.uniform(*_LOOK_S)
        """Seconds of waiting until the next sample."""

    def wait(self, seconds: float) -> None:
        """Record that the judge has waited this long for the sandbox."""
        self._waited_s += seconds
        self.next_look_s = max(0.0, self.next_look_s - seconds)

    def look(self) -> float:
        """Sample; return the seconds that the sandbox used of those waited since the last sample.

        Call it while the judge waits: between two tests the program has no process.
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
