"""Child processes and their CPU time, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def start(
    command: Sequence[str], *, variables: Mapping[str, str], folder: str, blocked: Sequence[int]
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process in a session of its own, connected by a socket, its standard input.

    Args:
        command: program and arguments.
        variables: its environment variables.
        folder: its working directory.
        blocked: signals with which blocked it starts.

    Returns:
        The socket, which never waits, and the process.
    """
    channel, theirs = socket.socketpair()
    channel.setblocking(False)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with theirs:
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), env=variables, cwd=folder, start_new_session=True
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return channel, process


def python_path() -> str:
    """PYTHONPATH with which a process finds this package in any working directory."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


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


__all__ = [
    *("can_run", "cpu_s", "cpu_s_of_all", "cpu_seconds", "descendants"),
    *("python_path", "start"),
]
