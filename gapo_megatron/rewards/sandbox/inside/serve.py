"""The first process of the sandbox: takes messages, starts the program, watches and ends it."""

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
MAX_STDERR_BYTES = 4096
FOLDER = os.getcwd()
DEVICES = frozenset(os.listdir("/dev"))
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36  # prctl(2)


def main() -> Callable[[], None]:
    """Serve the judge; return in a process of the program what it is to do there."""
    limits = json.loads(sys.argv[1])
    os.environ["HOME"] = FOLDER
    os.closerange(3, 1024)  # what whoever started us left open
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # nor may we have been told to ignore children
    libc = ctypes.CDLL(None)
    if os.getpid() == 1:
        install_filter()
    else:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whoever loses its parent becomes ours
    channel = Channel(os.dup(0), os.dup(1))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *SIGNALS_LEFT_TO_JUDGE})
    common_names()  # imported here once, not in every process
    channel.send({"ready": True})
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
            channel.send({"stdout": _text(files[1]), "failure": failure and _why(failure, files)})
        else:
            pid = os.fork()
            if pid == 0 and "check" in message:
                return lambda: check(message["check"], channel, limits)
            if pid == 0:
                return lambda: serve_calls(program, channel, limits)
            failure = _watch(pid, channel, limits, cpu_s=limits["total_s"])
            if failure:
                # The channel is the program's too, which may have stuffed it.
                with contextlib.suppress(OSError):
                    channel.send({"error": failure})
            os._exit(0)


def _open_files(text: str) -> list[FileIO]:
    """Standard input, output and error of one test: files without a name."""
    flags = os.O_TMPFILE | os.O_RDWR
    files = [FileIO(os.open(FOLDER, flags, 0o600), "r+") for _ in range(3)]
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[files[0].write(data) :]
    files[0].seek(0)
    return files


def _watch(pid: int, channel: Channel, limits: dict[str, int], *, cpu_s: float) -> str:
    """Wait for a process, end all that it left behind, and say how it failed, or ""."""
    before, oom_kills = _cpu_reaped(), _num_oom_kills()
    failure, status = "", None
    while status is None:
        signal.sigtimedwait({signal.SIGCHLD}, WATCH_INTERVAL_S)
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == pid:
                    status = reaped[1]
        if status is None and not failure:
            failure = _excess(limits, cpu_s=cpu_s, before=before)
            if channel.is_closed():
                failure = "is no longer asked for"  # the judge keeps the time
            if failure:
                os.kill(pid, signal.SIGKILL)
    _end_all()
    if not failure:  # what the last look missed
        failure = _excess_of_cpu(_cpu_reaped() - before, cpu_s)
    if failure or status == 0:
        return failure
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and _num_oom_kills() > oom_kills:
        os._exit(OUT_OF_MEMORY)
    if code == -signal.SIGXCPU:  # of a call, `serve_calls`
        return _excess_of_cpu(math.inf, limits["cpu_s"])
    return f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"


def _excess(limits: dict[str, int], *, cpu_s: float, before: float) -> str:
    """Which limit all processes together exceed, or ""."""
    processes = _processes()
    bound = limits["memory_mib"] * 2**20
    if sum(map(_resident_bytes, processes)) > bound and sum(map(_own_bytes, processes)) > bound:
        return f"used more than {limits['memory_mib']} MiB of memory"
    if failure := _excess_of_cpu(_cpu_reaped() - before + sum(map(cpu_seconds, processes)), cpu_s):
        return failure
    if os.getpid() != 1:  # its folder is one of the machine's
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
    """All that the program started: whoever loses its parent becomes our child."""
    if os.getpid() == 1:
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    return descendants(os.getpid())


def _resident_bytes(process: str) -> int:
    """Pages, also those in swap space, and the tables of addresses, which can be larger.

    Quick to ask, but counts a page once for every process that shares it. Each thread shows the
    memory of all, but those that have ended: the first may, before others.
    """
    most = 0
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{process}/task"):
            path = f"/proc/{process}/task/{thread}/status"
            most = max(most, _sum_bytes(path, b"VmRSS:", b"VmSwap:", b"VmPTE:"))
    return most


def _own_bytes(process: str) -> int:
    """Counts a shared page by its share; a process that denies the answer has all it can see."""
    try:
        shares = _sum_bytes(f"/proc/{process}/smaps_rollup", b"Pss:", b"SwapPss:")
        return shares + _sum_bytes(f"/proc/{process}/status", b"VmPTE:")
    except OSError:
        return _resident_bytes(process)


def _sum_bytes(path: str, *names: bytes) -> int:
    """Sum of the lines with one of these names, which the kernel writes in KiB."""
    with open(path, "rb") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(names))


def _num_mappings(process: str) -> int:
    """Of its memory, too many if it denies the answer; 0 if it has ended meanwhile.

    Each is a record in the kernel's memory, and may keep a file open that has no descriptor.
    """
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            try:
                with open(f"/proc/{process}/task/{thread}/maps", "rb") as file:
                    found = sum(1 for _ in itertools.islice(file, MAX_MAPPINGS + 1))
            except PermissionError:
                # Until `confine` a process cannot be looked into, and has our session.
                return 0 if os.getsid(int(process)) == os.getsid(0) else MAX_MAPPINGS + 1
            except OSError:
                continue  # this thread has ended
            if found:
                return found
    return 0


def _num_sockets() -> int:
    """Of the sandbox's own network. Each has a buffer in the kernel's memory."""
    with open("/proc/net/unix", "rb") as file:
        return sum(1 for _ in file) - 1  # the line of headings


def _num_oom_kills() -> int:
    """Processes of the whole machine that the kernel ended for want of memory."""
    with open("/proc/vmstat") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))


def _cpu_reaped() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end_all() -> None:
    """End all that the program started, and wait for it: for the time it took, too."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for process in [-1] if os.getpid() == 1 else map(int, _processes()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)


def _clean() -> None:
    """So that no test finds what another left: files and links, for the filter refuses folders."""
    if os.getpid() == 1:
        os.chmod(FOLDER, 0o700)
        for entry in list(os.scandir(FOLDER)):
            os.unlink(entry.path)
        for entry in list(os.scandir("/dev")):  # can be written to under Apptainer
            if entry.name not in DEVICES:
                os.unlink(entry.path)


def _text(file: FileIO) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _why(failure: str, files: list[FileIO]) -> str:
    """The failure and the last line that the program wrote about it."""
    end = files[2].seek(0, os.SEEK_END)
    files[2].seek(max(0, end - MAX_STDERR_BYTES))
    lines = files[2].read().decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{failure}: {last}" if last else failure
