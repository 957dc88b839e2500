"""What every sandbox is: limits, two ways to fail, and lines of JSON to a process of ours."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

START_TIMEOUT_S = 60.0
"""For a sandbox to start: 0.05 s, more while the machine is busy."""


MAX_VALUES = 1_000_000
"""Values in one reply, where nothing says how many there may be: some 100 MB once they are read."""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: nothing is known about the program."""


class ProgramError(RuntimeError):
    """The program failed: too slow, too large, crashed, or broke off."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use. Exceeding one of them is the program's failure."""

    cpu_s: int = 10
    """CPU seconds of one test, of all processes together; of function tests, see `total_s`."""
    wall_s: int = 20
    """Wall-clock seconds of one test or call."""
    total_s: int = 60
    """Wall-clock seconds of all tests of a program, and its CPU seconds in function tests."""
    memory_mib: int = 1024
    """Memory limit for each process, and for all processes together."""
    num_processes: int = 32
    """Processes and threads at a time, the one that watches the program included."""
    disk_mib: int = 64
    """Size of the private /tmp, the only writable place; holds a test's input and output too."""
    output_mib: int = 8
    """Limit for one test's standard output, for one returned value, and for any file."""

    def line_bytes(self) -> int:
        """The longest line a sandbox may write; JSON writes a byte as up to six."""
        return 6 * self.output_mib * 2**20 + 2**16


class Sandbox(ABC):
    """One running sandbox: a process of ours (`inside`) that runs the program on request."""

    def ask(self, message: dict[str, Any], *, max_values: int = MAX_VALUES) -> dict[str, Any]:
        """Send a message (see `inside`) and return the reply.

        Args:
            message: what the sandbox is to do.
            max_values: items and collections in the reply at most.

        Raises:
            ProgramError: no reply within `wall_s` or `total_s`, none at all, none of ours, or a
                larger one.
            SandboxError: the process of ours is gone, which the program cannot bring about.
        """
        self.send(message)
        return self.receive(max_values=max_values)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message that has no reply, or one to be received later. Raises as `ask`."""
        self.write_line(json.dumps(message).encode() + b"\n")

    def receive(self, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
        """Return the next reply. Raises as `ask`."""
        line = self.read_line()
        # The program may have written it: what fits in a line can need fifty times its memory.
        if _has_more_values(line, max_values):
            raise ProgramError(f"returned more than {max_values} values")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise ProgramError("answered something other than a value")
        return reply

    @abstractmethod
    def write_line(self, line: bytes) -> None:
        """Hand over one line; the first waits until the sandbox has started. Raises as `ask`."""

    @abstractmethod
    def read_line(self) -> bytes:
        """Return the next line, which the program may have written. Raises as `ask`."""

    @abstractmethod
    def close(self) -> None:
        """End every process of the sandbox."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_more_values(line: bytes, most: int) -> bool:
    """Whether JSON text holds more items and collections than `most`; takes linear time."""
    unescaped = line.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 4 * most:  # each has a key and a text at most
        return True
    outside_of_strings = b"".join(unescaped.split(b'"')[::2])
    return sum(map(outside_of_strings.count, (b"[", b"{", b","))) > most


__all__ = ["MAX_VALUES", "START_TIMEOUT_S", "Limits", "ProgramError", "Sandbox", "SandboxError"]
