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


def cpu_seconds(process: str, *, with_children: bool = True) -> float:
    """CPU time of all its threads, in steps of 10 ms; 0 if it has ended meanwhile.

    Args:
        process: its number.
        with_children: add that of the children it has waited for.
    """
    try:
        times = _stat(process)[11 : 15 if with_children else 13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def can_run(process: str) -> bool:
    """Whether one of its threads can; not if it lets others go first, or has ended meanwhile."""
    with (
        contextlib.suppress(OSError),  # a kernel without such groups
        open(f"/proc/{process}/autogroup") as file,
    ):
        group = file.read().split()  # nothing in the session that the kernel started with
        if group and int(group[-1]) > 0:
            return False
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{process}/task")
        return any(_stat(f"{process}/task/{thread}")[0] == b"R" for thread in threads)
    return False


def _stat(path: str) -> list[bytes]:
    """What stands behind the name, which need not be text."""
    with open(f"/proc/{path}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


__all__ = ["can_run", "cpu_seconds", "descendants"]
