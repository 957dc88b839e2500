"""What every sandbox is: limits, two ways to fail, and lines of JSON to a process of ours."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

START_TIMEOUT_S = 60.0
"""For a sandbox to start: 0.05 s, more while the machine is busy."""

_COUNTED_AT_ONCE = 2**16
"""Bytes: splitting all of a line at its quotes can need twenty times its memory."""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: nothing is known about the program."""


class ProgramError(RuntimeError):
    """The program failed: too slow, too large, crashed, or broke off."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use. Exceeding one of them is the program's failure."""

    cpu_s: int = 10
    """CPU seconds of one test, of all its processes together. Of one call of a function: of the
    process that answers it, and up to one more; of all calls, see `total_s`."""
    wall_s: int = 20
    """Seconds of one test or call: of wall-clock time, but where a process of the program can run,
    of its CPU time (`Meter`)."""
    total_s: int = 60
    """The same of all tests of a program, and its CPU seconds in function tests."""
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

    def max_values(self) -> int:
        """Most values that a reply of `output_mib` can hold: each takes two bytes of JSON."""
        return self.output_mib * 2**20 // 2


class Sandbox(ABC):
    """One running sandbox: a process of ours (`inside`) that runs the program on request."""

    _limits: Limits

    def ask(self, message: dict[str, Any], *, max_values: int | None = None) -> dict[str, Any]:
        """Send a message (see `inside`) and return the reply.

        Args:
            message: what the sandbox is to do.
            max_values: items and collections in the reply at most; `Limits.max_values` by default.

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

    def receive(self, *, max_values: int | None = None) -> dict[str, Any]:
        """Return the next reply. Raises as `ask`."""
        line = self.read_line()
        most = self._limits.max_values() if max_values is None else max_values
        # The program may have written it: what fits in a line can need fifty times its memory.
        if _has_more_values(line, most):
            raise ProgramError(f"returned more than {most} values")
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
    num_values, is_inside = 0, 0
    for start in range(0, len(unescaped), _COUNTED_AT_ONCE):
        parts = unescaped[start : start + _COUNTED_AT_ONCE].split(b'"')
        outside_of_strings = b"".join(parts[is_inside::2])
        num_values += sum(map(outside_of_strings.count, (b"[", b"{", b",")))
        if num_values > most:
            return True
        is_inside ^= (len(parts) - 1) % 2
    return False


__all__ = ["START_TIMEOUT_S", "Limits", "ProgramError", "Sandbox", "SandboxError"]
