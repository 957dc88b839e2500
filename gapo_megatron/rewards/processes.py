"""Child processes and their CPU time, read from /proc; also used inside the sandbox."""

from __future__ import annotations

import contextlib
import os


def descendants(pid: int) -> list[str]:
    """Children and further descendants; without those that were reparented."""
    found = [str(pid)]
    for process in found:  # grows as children are added
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    found += file.read().split()
    return found[1:]


def cpu_seconds(process: str, *, with_children: bool = True) -> float:
    """CPU time of a process with all its threads, in steps of 10 ms; 0 if it has ended.

    Args:
        process: pid.
        with_children: add the CPU time of children that it has waited for.
    """
    try:
        times = _stat(process)[11 : 15 if with_children else 13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def cpu_s(pid: int) -> float:
    """CPU seconds of a process without its children."""
    return cpu_seconds(str(pid), with_children=False)


def cpu_s_of_all(pid: int) -> float:
    """CPU seconds of a process and its children."""
    return sum(map(cpu_seconds, (str(pid), *descendants(pid))))


def can_run(process: str) -> bool:
    """Whether a thread of the process is runnable and not of low priority; False if it has ended.

    A process in an autogroup with a positive nice value may be starved by choice.
    """
    with (
        contextlib.suppress(OSError),  # a kernel without autogroups
        open(f"/proc/{process}/autogroup") as file,
    ):
        group = file.read().split()  # empty in the kernel's first session
        if group and int(group[-1]) > 0:
            return False
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{process}/task")
        return any(_stat(f"{process}/task/{thread}")[0] == b"R" for thread in threads)
    return False


def _stat(path: str) -> list[bytes]:
    """Fields of a `stat` file after the name, which may hold any bytes."""
    with open(f"/proc/{path}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


__all__ = ["can_run", "cpu_s", "cpu_s_of_all", "cpu_seconds", "descendants"]
