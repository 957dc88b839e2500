"""What the sandbox counts of a program: time, memory and values; and the filter's numbers."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gapo_megatron.rewards import processes
from gapo_megatron.rewards.code import verify
from gapo_megatron.rewards.processes import can_run, descendants
from gapo_megatron.rewards.sandbox import SYSTEM_PYTHON, Limits, ProgramError, base, meter, process
from gapo_megatron.rewards.sandbox.inside import seccomp
from gapo_megatron.rewards.sandbox.inside.seccomp import compile_filter
from gapo_megatron.rewards.sandbox.process import ProcessSandbox
from gapo_megatron.types import Outcome
from tests.rewards.test_code_sandbox import run_first
from tests.sandbox_setup import CORRECT, PATIENT, SUM, fenced, needs_sandbox
from tests.waiting import HANG_S, wait_until

pytestmark = needs_sandbox


def test_what_is_counted_is_outside_of_text():
    text = json.dumps({"stdout": '[[,,{\\"' * 1000, "failure": ""}).encode()
    assert not base._has_more_values(text, 3)
    assert base._has_more_values(b'{"value": [1, [2, 3]], "x": "]"}', 5)
    assert not base._has_more_values(b'{"value": [1, [2, 3]], "x": "]"}', 6)
    assert base._has_more_values(b'["",' * 40, 10)


def test_what_is_counted_is_outside_of_text_at_every_place_where_counting_is_cut():
    block = base._COUNTED_AT_ONCE
    for length in range(block - 4, block + 4):
        text = json.dumps(["x" * length, "[,[,", [1]]).encode()
        assert not base._has_more_values(text, 4) and base._has_more_values(text, 3)


BURNS = """
import os, time
def burn(seconds):
    start = time.process_time()
    while time.process_time() < start + seconds: pass
"""


@pytest.mark.system
@pytest.mark.parametrize("kind", ["bubblewrap", "unsafe"])
@pytest.mark.parametrize(
    "program",
    [
        "for _ in range(4): os.fork() or burn(0.5) or os._exit(0)\nfor _ in range(4): os.wait()",
        "for _ in range(100):\n    os.fork() or burn(0.02) or os._exit(0)\n    os.wait()",
        "for _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        os.fork() or burn(0.5)\n        os._exit(0)\n    os.wait()\ntime.sleep(5)",
        "if os.fork() == 0:\n    for _ in range(4): os.fork() or burn(0.5) or os._exit(0)\n"
        "    for _ in range(4): os.wait()\n    os._exit(0)\nos.wait()",
        "import threading as t\nfor _ in range(4):\n"
        "    x = t.Thread(target=burn, args=(0.5,))\n    x.start()\n    x.join()",
    ],
)
def test_the_time_of_all_processes_is_counted_together(kind, program):
    tests = json.dumps({"inputs": [""], "outputs": ["7"]})
    response = fenced(f"{BURNS}{program}\nprint(7)")
    short, long = PATIENT | {"cpu_s": 1}, PATIENT | {"cpu_s": 30}
    verdict = verify(response, tests, limits=short, sandbox=kind)
    assert (verdict.outcome, "CPU time" in verdict.reason) == (Outcome.WRONG, True)
    assert verify(response, tests, limits=long, sandbox=kind) == CORRECT


TAKES_MEMORY = """
import ctypes, mmap, os, sys, threading, time
libc = ctypes.CDLL(None)
def take():
    x = bytearray(b"x") * (100 * 2**20)
    time.sleep(3600)
def read():  # the same page of zeros, at addresses that need 4 KiB of tables each, and more
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5
    for n in range(10_000):
        place = libc.mmap(2**32 + 2**30 * n, 4096, mmap.PROT_READ, 0x22, -1, 0)
        ctypes.c_char.from_address(place).value
    time.sleep(3600)
def outlive():
    while open("/proc/self/stat").read().split()[2] != "Z": time.sleep(0.01)
    take()
def thread():  # goes on after the first one
    threading.Thread(target=outlive).start()
    libc.pthread_exit(None)
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        WHAT()
time.sleep(3600)
"""


@pytest.mark.system
@pytest.mark.parametrize("kind", ["bubblewrap", "unsafe"])
@pytest.mark.parametrize("what", ["take", "read", "thread"])
def test_the_memory_of_all_processes_is_counted_together(kind, what):
    program = TAKES_MEMORY.replace("WHAT", what)
    limits = PATIENT | {"memory_mib": 256}
    verdict = verify(fenced(program), json.dumps(SUM), limits=limits, sandbox=kind)
    # Pages that are only read need so many mappings that their own limit may come first.
    limited = ("256 MiB", "mappings") if what == "read" else ("256 MiB",)
    assert verdict.outcome is Outcome.WRONG and any(one in verdict.reason for one in limited)


@pytest.mark.system
def test_a_program_that_ends_between_two_looks_is_counted_too(monkeypatch):
    run_first(monkeypatch, "module.WATCH_INTERVAL_S = 3600")
    program = f"{BURNS}for _ in range(4): os.fork() or burn(0.5) or os._exit(0)\n"
    program += "for _ in range(4): os.wait()\nprint(7)"
    tests = json.dumps({"inputs": [""], "outputs": ["7"]})
    verdict = verify(fenced(program), tests, limits=PATIENT | {"cpu_s": 1})
    assert (verdict.outcome, "CPU time" in verdict.reason) == (Outcome.WRONG, True)


class Waits:
    """Stands in for the clock of sandboxes, and for `poll`: a wait takes what a test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.each_s = 0.0
        self.counted_s = 0.0
        self.is_over = False

    def monotonic(self) -> float:
        return self.now

    def poll(self) -> SimpleNamespace:
        real = select.poll()

        def wait(milliseconds: float) -> list[tuple[int, int]]:
            self.counted_s += min(self.each_s, milliseconds / 1000)
            self.now += self.each_s
            return [] if self.is_over else real.poll(1000 * HANG_S)

        return SimpleNamespace(register=real.register, poll=wait)


def test_only_what_is_waited_for_the_program_is_its_time(monkeypatch):
    waits = Waits()
    monkeypatch.setattr(process, "time", waits)
    monkeypatch.setattr(
        process,
        "select",
        SimpleNamespace(
            poll=waits.poll,
            **{name: getattr(select, name) for name in ("POLLIN", "POLLOUT", "POLLRDHUP")},
        ),
    )
    monkeypatch.setattr(meter, "can_run", lambda _: False)
    limits = Limits(total_s=50, wall_s=600)
    with ProcessSandbox(limits, kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": "def f(): pass", "prelude": ""})
        box.send({"calls": True})
        for _ in range(2):
            box.send({"function": ["f"], "args": [], "kwargs": {}})
            waits.each_s = 20
            assert box.receive() == {"value": None}
            waits.each_s = 0
            waits.now += 1000  # between two calls
        waits.each_s, waits.is_over = 9, True
        with pytest.raises(ProgramError, match="50 s"):
            box.receive()
    # A wait beyond what was asked for is this process's own, and so is the time between calls.
    assert 50 <= waits.counted_s < 50.5


LOWERS_ITS_GROUP = """
os.setsid()
with open("/proc/self/autogroup", "w") as file: file.write("19")
print(flush=True)
while True: pass"""
THREAD = "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"
has_groups = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="no groups of processes in this kernel"
)


@pytest.mark.parametrize("is_child", [False, True])
@pytest.mark.parametrize(
    ("body", "is_asleep"),
    [
        ("time.sleep(99)", True),
        ("while True: pass", False),
        (THREAD, False),
        pytest.param(LOWERS_ITS_GROUP, True, marks=has_groups),
    ],
)
def test_wall_clock_time_counts_while_all_sleep_and_cpu_time_while_one_can_run(
    body, is_asleep, is_child
):
    program = f"import os, time\nprint(flush=True)\n{body}"
    if is_child:
        program = "import os\nif os.fork(): os.wait(); os._exit(0)\n" + program
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        children = [str(process.pid), *descendants(process.pid)]
        try:
            wait_until(lambda: any(map(can_run, children)) is not is_asleep, "that it has begun")
            if body == THREAD:  # the state of a process is that of its main thread
                stat = Path(f"/proc/{children[-1]}/stat")
                wait_until(lambda: ") S " in stat.read_text(), "that the main thread waits")
            watch = meter.Meter(process.pid)
            watch.wait(3600)
            assert (watch.look() == 3600) is is_asleep
        finally:
            for one in reversed(children):
                os.kill(int(one), signal.SIGKILL)


def test_a_process_without_a_group_can_run(monkeypatch):
    def opened(path, *mode):
        return io.StringIO() if path.endswith("/autogroup") else open(path, *mode)

    monkeypatch.setattr(processes, "open", opened, raising=False)
    assert can_run("self")


def test_the_filter_names_each_architecture_and_no_other():
    assert len(compile_filter("x86_64")) == len(compile_filter("aarch64"))
    with pytest.raises(KeyError):
        compile_filter("riscv64")


@pytest.mark.parametrize(
    ("column", "table", "aliases"),
    [
        (0, "x86_64-linux-gnu/asm/unistd_64.h", {}),
        (1, "asm-generic/unistd.h", {"inotify_init": "inotify_init1", "mkdir": "mkdirat"}),
    ],
)
def test_the_numbers_of_the_filter_are_those_of_the_kernel(column, table, aliases):
    header = Path("/usr/include") / table
    if not header.exists():
        pytest.skip(f"{header}: the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    theirs = {name: int(number) for name, number in found}
    ours = {name: numbers[column] for name, numbers in seccomp.DENIED.items()}
    ours |= {name: numbers[column] for name, (numbers, _) in seccomp.DENIED_IN_PART.items()}
    ours["clone3"] = seccomp.CLONE3
    known = {name: theirs.get(aliases.get(name, name)) for name in ours}
    newer = {name: number for name, number in ours.items() if number > max(theirs.values())}
    assert ours == known | newer  # than these headers
