"""The first process of the sandbox: reads messages; starts, watches and kills the program."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from io import FileIO

from gapo_megatron.rewards.processes import cpu_seconds, descendants
from gapo_megatron.rewards.sandbox.inside.asserts import check
from gapo_megatron.rewards.sandbox.inside.channel import OUT_OF_MEMORY, Channel
from gapo_megatron.rewards.sandbox.inside.program import (
    SIGNALS_LEFT_TO_JUDGE,
    become_program,
    common_names,
    serve_calls,
)
from gapo_megatron.rewards.sandbox.inside.seccomp import install_filter

WATCH_INTERVAL_S = 0.05
MAX_FILES = 10_000
MAX_MAPPINGS = 20_000
MAX_SOCKETS = 128
MAX_STDERR_BYTES = 2**16
MAX_LAST_LINE_BYTES = 4096
FOLDER = os.getcwd()
DEVICES = frozenset(os.listdir("/dev"))
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36  # prctl(2)


def main() -> Callable[[], None]:
    """Serve the judge. In a forked process, return the function that runs the program there."""
    # Shut this process off: no inherited files, signals or output; unreadable for the program.
    limits = json.loads(sys.argv[1])
    os.environ["HOME"] = FOLDER
    os.closerange(3, 1024)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may have been inherited as ignored
    libc = ctypes.CDLL(None)
    if os.getpid() == 1:
        install_filter()
    else:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become our children
    channel = Channel(os.dup(0), os.dup(1))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *SIGNALS_LEFT_TO_JUDGE})
    common_names()  # import once, not in every process
    channel.send({"ready": True})
    # One message after the other; a call or check takes over the channel until the end.
    program: dict[str, str] = {}
    is_first = True
    while True:
        message = channel.receive()
        if "program" in message:
            program = message
        elif "stdin" in message:
            try:
                _clean()
                files = _open_files(message["stdin"])
            except OSError as error:
                if is_first:
                    raise
                channel.send({"stdout": "", "failure": f"left its folder unusable: {error}"})
                continue
            is_first = False
            pid = os.fork()
            if pid == 0:
                return lambda: become_program(program, files, limits)
            failure = _watch(pid, channel, limits, cpu_s=limits["cpu_s"])
            reply = {"stdout": _text(files[1]), "stderr": _text(files[2], MAX_STDERR_BYTES)}
            channel.send(reply | {"failure": failure and _why(failure, files)})
        else:
            pid = os.fork()
            if pid == 0 and "check" in message:
                return lambda: check(message["check"], channel, limits)
            if pid == 0:
                return lambda: serve_calls(program, channel, limits)
            failure = _watch(pid, channel, limits, cpu_s=limits["total_s"])
            if failure:
                # The program shares the channel, and may have filled it.
                with contextlib.suppress(OSError):
                    channel.send({"error": failure})
            os._exit(0)


def _open_files(text: str) -> list[FileIO]:
    """Unnamed files for the standard input, output and error of one test."""
    flags = os.O_TMPFILE | os.O_RDWR
    files = [FileIO(os.open(FOLDER, flags, 0o600), "r+") for _ in range(3)]
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[files[0].write(data) :]
    files[0].seek(0)
    return files


def _watch(pid: int, channel: Channel, limits: dict[str, int], *, cpu_s: float) -> str:
    """Wait for a process, kill what it left behind, and say how it failed; "" if it did not."""
    before, oom_kills = _cpu_reaped(), _num_oom_kills()
    failure, status = "", None
    # Until it ends: reap children, and check the limits of all its processes together.
    while status is None:
        signal.sigtimedwait({signal.SIGCHLD}, WATCH_INTERVAL_S)
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == pid:
                    status = reaped[1]
        if status is None and not failure:
            failure = _excess(limits, cpu_s=cpu_s, before=before)
            if channel.is_closed():
                failure = "was abandoned by the judge"  # it measures the wall-clock time
            if failure:
                os.kill(pid, signal.SIGKILL)
    _end_all()
    if not failure:  # CPU time since the last check
        failure = _excess_of_cpu(_cpu_reaped() - before, cpu_s)
    if failure or status == 0:
        return failure
    # It ended by itself, with an error.
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and _num_oom_kills() > oom_kills:
        os._exit(OUT_OF_MEMORY)
    if code == -signal.SIGXCPU:  # the limit of a call, see `serve_calls`
        return _excess_of_cpu(math.inf, limits["cpu_s"])
    return f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"


def _excess(limits: dict[str, int], *, cpu_s: float, before: float) -> str:
    """Name the limit that all processes together exceed; "" if none."""
    processes = _processes()
    bound = limits["memory_mib"] * 2**20
    if sum(map(_resident_bytes, processes)) > bound and sum(map(_own_bytes, processes)) > bound:
        return f"used more than {limits['memory_mib']} MiB of memory"
    if failure := _excess_of_cpu(_cpu_reaped() - before + sum(map(cpu_seconds, processes)), cpu_s):
        return failure
    if os.getpid() != 1:  # without a sandbox the folder is on the machine's disk
        return ""
    disk = os.statvfs(FOLDER)
    if (disk.f_blocks - disk.f_bfree) * disk.f_frsize > limits["disk_mib"] * 2**20:
        return f"wrote more than {limits['disk_mib']} MiB"
    if disk.f_files - disk.f_ffree > MAX_FILES:
        return f"made more than {MAX_FILES} files"
    if _num_sockets() > MAX_SOCKETS:
        return f"opened more than {MAX_SOCKETS} sockets"
    if sum(map(_num_mappings, processes)) > MAX_MAPPINGS:
        return f"made more than {MAX_MAPPINGS} memory mappings, or hides them"
    return ""


def _excess_of_cpu(seconds: float, cpu_s: float) -> str:
    return f"took more than {cpu_s:g} s of CPU time" if seconds > cpu_s else ""


def _processes() -> list[str]:
    """All processes of the program; orphans become our children."""
    if os.getpid() == 1:
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    return descendants(os.getpid())


def _resident_bytes(process: str) -> int:
    """Bytes of resident and swapped pages and of page tables.

    Fast, but counts a shared page once per process. Every live thread reports the memory of the
    whole process; the first thread may have ended before others.
    """
    most = 0
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            path = f"/proc/{process}/task/{thread}/status"
            most = max(most, _sum_bytes(path, b"VmRSS:", b"VmSwap:", b"VmPTE:"))
    return most


def _own_bytes(process: str) -> int:
    """The same with shared pages divided among their processes; resident bytes if not readable."""
    try:
        shares = _sum_bytes(f"/proc/{process}/smaps_rollup", b"Pss:", b"SwapPss:")
        return shares + _sum_bytes(f"/proc/{process}/status", b"VmPTE:")
    except OSError:
        return _resident_bytes(process)


def _sum_bytes(path: str, *names: bytes) -> int:
    """Sum of the lines with these names, which are in KiB."""
    with open(path, "rb") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(names))


def _num_mappings(process: str) -> int:
    """Memory mappings of a process: too many if not readable, 0 if it has ended.

    Each takes kernel memory, and may keep a file open without a descriptor.
    """
    with contextlib.suppress(OSError):
        # `confine` makes a process readable, then leaves our session: asked in the other order, one
        # that does so meanwhile would seem to hide.
        is_starting = os.getsid(int(process)) == os.getsid(0)
        for thread in os.listdir(f"/proc/{process}/task"):
            try:
                with open(f"/proc/{process}/task/{thread}/maps", "rb") as file:
                    found = sum(1 for _ in itertools.islice(file, MAX_MAPPINGS + 1))
            except PermissionError:
                return 0 if is_starting else MAX_MAPPINGS + 1
            except OSError:
                continue  # this thread has ended
            if found:
                return found
    return 0


def _num_sockets() -> int:
    """Sockets in the sandbox's network namespace; each has a buffer in kernel memory."""
    with open("/proc/net/unix", "rb") as file:
        return sum(1 for _ in file) - 1  # without the heading


def _num_oom_kills() -> int:
    """Processes of the machine that the kernel killed for lack of memory."""
    with open("/proc/vmstat") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))


def _cpu_reaped() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end_all() -> None:
    """Kill all processes of the program and wait for them, so that their CPU time counts."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for process in [-1] if os.getpid() == 1 else map(int, _processes()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)


def _clean() -> None:
    """Remove files and links that a test left; the filter allows no folders."""
    if os.getpid() == 1:
        os.chmod(FOLDER, 0o700)
        for entry in list(os.scandir(FOLDER)):
            os.unlink(entry.path)
        for entry in list(os.scandir("/dev")):  # writable under Apptainer
            if entry.name not in DEVICES:
                os.unlink(entry.path)


def _text(file: FileIO, most: int = -1) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", "replace")


def _why(failure: str, files: list[FileIO]) -> str:
    """The failure, with the last line on the program's standard error."""
    end = files[2].seek(0, os.SEEK_END)
    files[2].seek(max(0, end - MAX_LAST_LINE_BYTES))
    lines = files[2].read().decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{failure}: {last}" if last else failure
