"""The interface of sandboxes: limits, two kinds of failure, and JSON lines to a runner process."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

START_TIMEOUT_S = 60.0
"""Time for a sandbox to start: usually 0.05 s, more on a busy machine."""

_COUNTED_AT_ONCE = 2**16
"""Bytes per piece: splitting a whole line at its quotes could take twenty times its memory."""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: nothing is known about the program."""


class ProgramError(RuntimeError):
    """The program failed: too slow, too large, crashed, or exited early."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program. Exceeding a limit is a failure of the program."""

    cpu_s: int = 10
    """CPU seconds of one test, over all its processes. In function tests: of the process that
    answers a call, up to one second more; see `total_s` for all calls."""
    wall_s: int = 20
    """Seconds of one test or call, as `Meter` counts: CPU time while a process of the program is
    runnable, else wall-clock time."""
    total_s: int = 60
    """The same for all tests of a program together; in function tests also its CPU seconds."""
    memory_mib: int = 1024
    """Memory limit for each process, and for all processes together."""
    num_processes: int = 32
    """Processes and threads at a time, including the one that watches the program."""
    disk_mib: int = 64
    """Size of the private /tmp, the only writable folder; it also holds a test's input and
    output."""
    output_mib: int = 8
    """Limit for one test's standard output, for one returned value, and for any file."""

    def line_bytes(self) -> int:
        """The longest line that a sandbox may write; JSON needs up to six bytes per byte."""
        return 6 * (self.output_mib * 2**20 + 2**16) + 2**16

    def max_values(self) -> int:
        """Most values that a reply of `output_mib` can hold, at two bytes of JSON each."""
        return self.output_mib * 2**20 // 2


class Sandbox(ABC):
    """A running sandbox, in which a runner process of ours (`inside`) runs the program."""

    _limits: Limits

    def ask(self, message: dict[str, Any], *, max_values: int | None = None) -> dict[str, Any]:
        """Send a message (see `inside`) and return the reply.

        Args:
            message: request to the sandbox.
            max_values: most items and collections in the reply; default: `Limits.max_values`.

        Raises:
            ProgramError: no reply within `wall_s` or `total_s`, a malformed or too large one, or
                the program has exited.
            SandboxError: the runner process is gone, which the program cannot cause.
        """
        self.send(message)
        return self.receive(max_values=max_values)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message without waiting for a reply. Raises as `ask`."""
        self.write_line(json.dumps(message).encode() + b"\n")

    def receive(self, *, max_values: int | None = None) -> dict[str, Any]:
        """Return the next reply. Raises as `ask`."""
        line = self.read_line()
        most = self._limits.max_values() if max_values is None else max_values
        # The program may have written the line: parsed, it can take fifty times its memory.
        if _has_more_values(line, most):
            raise ProgramError(f"returned more than {most} values")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise ProgramError("sent a reply that is not a JSON object")
        return reply

    @abstractmethod
    def write_line(self, line: bytes) -> None:
        """Write one line; the first waits until the sandbox has started. Raises as `ask`."""

    @abstractmethod
    def read_line(self) -> bytes:
        """Return the next line, possibly written by the program. Raises as `ask`."""

    @abstractmethod
    def close(self) -> None:
        """End every process of the sandbox."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_more_values(line: bytes, most: int) -> bool:
    """Whether JSON text holds more than `most` items and collections; takes linear time."""
    unescaped = line.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 4 * most:  # at most a key and a text per value
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
