"""Processes that another one started, as /proc shows them."""

from __future__ import annotations

import contextlib
import os


def descendants(pid: int) -> list[str]:
    """All that it started, and what these started, as far as none lost its parent to another."""
    found = [str(pid)]
    for process in found:  # grows as children are added
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    found += file.read().split()
    return found[1:]


def stat(process: str) -> tuple[bool, float]:
    """Whether it can run, and its CPU seconds, with those of children that it has waited for.

    Of a process that has ended meanwhile: no, and 0.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:  # its name need not be text
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False, 0.0
    return fields[0] == b"R", sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


__all__ = ["descendants", "stat"]
