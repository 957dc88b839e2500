"""The sandbox of programs: what starts it, what ends it, and what is left of it."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from gapo_megatron.config import RewardConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards import processes
from gapo_megatron.rewards.code import verify
from gapo_megatron.rewards.pool import Pool
from gapo_megatron.rewards.processes import can_run, descendants
from gapo_megatron.rewards.sandbox import (
    SYSTEM_PYTHON,
    Limits,
    ProgramError,
    SandboxError,
    base,
    meter,
    process,
    split_setting,
)
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.rewards.sandbox.inside import seccomp
from gapo_megatron.rewards.sandbox.inside.seccomp import compile_filter
from gapo_megatron.rewards.sandbox.process import ProcessSandbox
from gapo_megatron.types import Outcome, Verdict
from tests.hostile import read_programs
from tests.rewards.test_code_hostile import ASSERTS, CALL_TESTS
from tests.sandbox_setup import PATIENT, needs_sandbox, processes_with
from tests.waiting import HANG_S, wait_until

pytestmark = needs_sandbox

ROOT = Path(__file__).parents[2]
NUM_PROCESSES = 4
"""Of a program with one child: bubblewrap, ours, the two."""
READS = "a, b = map(int, input().split())\n"
SUM = {"inputs": ["3 4\n", "10 20\n"], "outputs": ["7\n", "30\n"]}


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def judge(program: str, tests: object) -> Verdict:
    return verify(fenced(program), json.dumps(tests), limits=PATIENT)


def test_verdicts_without_a_sandbox_are_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    verdict = judge(READS + "print(a + b)", SUM)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "bwrap" in verdict.reason


def test_a_sandbox_that_dies_says_nothing_about_the_program():
    with ProcessSandbox(Limits(), kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": "input()", "prelude": ""})
        os.killpg(box._process.pid, signal.SIGKILL)
        box._process.wait()  # till then what is inside may answer
        with pytest.raises(SandboxError, match="ended with code -9"):
            box.ask({"stdin": ""})


def test_a_program_that_the_kernel_ends_for_want_of_memory_is_unknown(monkeypatch):
    program = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    killed = Verdict(Outcome.WRONG, "test 1: the program was killed by signal 9")
    assert judge(program, SUM) == killed
    # The same, while the kernel counts one more process ended for that.
    counts = "module._num_oom_kills = iter(range(9)).__next__; module.main()()"
    original = process.start_command

    def start_command(*args, **options):
        return [part.replace("module.main()()", counts) for part in original(*args, **options)]

    monkeypatch.setattr(process, "start_command", start_command)
    unknown = Verdict(Outcome.UNKNOWN, "the machine ran out of memory")
    assert judge(program, SUM) == unknown


@pytest.mark.parametrize("tests", [{"inputs": [""], "outputs": ["1000"]}, CALL_TESTS])
def test_the_kernel_ends_a_program_before_the_trainer_for_want_of_memory(tests):
    found = "int(open('/proc/self/oom_score_adj').read())"
    called = f"def add(a, b):\n    return a + b if {found} == 1000 else 0\n"
    assert judge(called + f"print({found})", tests).outcome is Outcome.CORRECT


def test_a_program_that_stuffs_its_channel_is_wrong_and_not_unknown():
    program = (
        "import os\n"
        "def f():\n"
        "    for n in range(3, 64):\n"
        "        try:\n"
        "            os.set_blocking(n, False)\n"
        "            for _ in range(2**17): os.write(n, b'x')\n"
        "        except OSError: pass\n"
        "    os._exit(3)"
    )
    with ProcessSandbox(Limits(), kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": program, "prelude": ""})
        box.send({"calls": True})
        box.send({"function": ["f"], "args": [], "kwargs": {}})
        assert box._process.wait(timeout=HANG_S) == 0  # it cannot say why, and yet ends in order
        with pytest.raises(ProgramError, match="broke off"):
            box.receive()


@pytest.mark.parametrize("tests", [CALL_TESTS, ASSERTS])
def test_junk_beside_a_wrong_value_is_wrong_and_costs_the_judge_little(tests):
    """48 MB of text that would be 2 GB of lists."""
    ((_, reason, source),) = [one for one in read_programs("calls.txt") if "nested junk" in one[0]]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verdict = verify(f"```\n{source.replace('40_000', '390_000')}\n```", json.dumps(tests))
    assert verdict.outcome is Outcome.WRONG and re.search(reason, verdict.reason)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB


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


def _wait_until_gone(marker: str) -> None:
    wait_until(lambda: not processes_with(marker), "the end of a sandbox's processes")


def test_nothing_is_left_of_a_sandbox_when_it_closes_or_its_judge_is_killed():
    limits = Limits(num_processes=17, disk_mib=61, **PATIENT)  # recognised by its command line
    marker = f"{61 * 2**20}"
    with ProcessSandbox(limits, kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": "import os, time\nos.fork()\ntime.sleep(3600)", "prelude": ""})
        box.send({"stdin": ""})
        _wait_for_child(box)
        assert processes_with(marker)
    _wait_until_gone(marker)

    program = "import time\ntime.sleep(3600)"  # no limit of its own ends it
    script = (
        "from gapo_megatron.rewards.sandbox import *\n"
        "box = start_sandbox(Limits(disk_mib=61), sandbox='bubblewrap', python=SYSTEM_PYTHON)\n"
        f"box.send({{'program': {program!r}, 'prelude': ''}})\n"
        "box.send({'stdin': ''})\nprint('started', flush=True)\nbox.receive()"
    )
    judge_process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert judge_process.stdout is not None
    assert judge_process.stdout.readline() == b"started\n"
    judge_process.kill()
    judge_process.wait()
    judge_process.stdout.close()
    _wait_until_gone(marker)


def _tree(root: int) -> list[int]:
    """A process and all that it started."""
    found = [root]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def _wait_for_child(box: ProcessSandbox) -> list[int]:
    """The sandbox's processes, the program's child last, once it has one."""

    def grown() -> list[int]:  # bubblewrap, ours, the program, its child
        tree = _tree(box._process.pid)
        return tree if len(tree) >= NUM_PROCESSES else []

    return wait_until(grown, "a child of the program")


def test_signals_of_the_job_do_not_reach_programs():
    program = (
        "import os, signal\n"
        "if os.fork() == 0:\n"
        "    while True: signal.pause()\n"
        "_, status = os.wait()\n"
        "print(os.waitstatus_to_exitcode(status))"
    )
    limits = Limits(**PATIENT)
    with ProcessSandbox(limits, kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": program, "prelude": ""})
        box.send({"stdin": ""})
        tree = _wait_for_child(box)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            for member in tree:
                os.kill(member, number)
        os.kill(tree[-1], signal.SIGKILL)  # what alone ends it, and with it the program
        assert box.receive() == {"stdout": "-9\n", "failure": ""}


def test_the_check_tries_the_walls():
    check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits(memory_mib=128))


def test_the_check_names_a_wall_that_is_missing(monkeypatch):
    unfiltered = "module.install_filter = int; module.main()()"
    original = process.start_command

    def start_command(*args, **options):
        return [part.replace("module.main()()", unfiltered) for part in original(*args, **options)]

    monkeypatch.setattr(process, "start_command", start_command)
    with pytest.raises(ConfigError, match="sockets"):
        check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits(memory_mib=128))


def test_the_check_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"reward\.sandbox .*bwrap"):
        check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits())


def test_the_check_names_an_interpreter_that_is_not_there():
    with pytest.raises(ConfigError, match=r"reward\.python \('/nonexistent'\)"):
        check_sandbox(sandbox="bubblewrap", python="/nonexistent", limits=Limits())


def test_the_check_names_an_interpreter_that_is_none():
    with pytest.raises(ConfigError, match=r"reward\.python \('/bin/echo'\).*no Python"):
        check_sandbox(sandbox="bubblewrap", python="/bin/echo", limits=Limits())


def test_the_check_names_an_interpreter_that_programs_could_not_see(tmp_path):
    if not tmp_path.is_relative_to("/tmp"):
        pytest.skip("the tests' folder is not in /tmp")
    python = tmp_path / "python"
    python.symlink_to(SYSTEM_PYTHON)
    with pytest.raises(ConfigError, match=r"/tmp "):
        check_sandbox(sandbox="bubblewrap", python=str(python), limits=Limits())


def test_without_a_sandbox_programs_run_only_when_told_and_with_a_warning():
    with pytest.warns(UserWarning, match="RIGHTS"):
        check_sandbox(sandbox="unsafe", python=sys.executable, limits=Limits(num_processes=2))
    answer = json.dumps(SUM)
    verdict = verify(
        fenced(READS + "print(a + b)"),
        answer,
        limits=PATIENT,
        sandbox="unsafe",
        python=sys.executable,
    )
    assert verdict == Verdict(Outcome.CORRECT)


def test_without_a_namespace_nothing_is_left_of_a_program_either():
    seconds = 300 + os.getpid() / 2**23  # recognised by its command line
    program = f"import os, time\nos.execlp('sleep', 'sleep', '{seconds!r}')"
    limits = Limits(wall_s=1)
    with ProcessSandbox(limits, kind="unsafe", python=SYSTEM_PYTHON) as box:
        box.send({"program": program, "prelude": ""})
        with pytest.raises(ProgramError, match="longer than 1 s"):
            box.ask({"stdin": ""})
        wait_until(lambda: processes_with(repr(seconds)), "the program's other command line")
    _wait_until_gone(repr(seconds))


LEAVES_ORPHANS = """
import os, signal, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(3600)
        os._exit(0)
"""
ENDINGS = [
    ("print(7)", SUM),
    ("1/0", SUM),
    ("import os\nos.abort()", SUM),
    (LEAVES_ORPHANS + READS + "print(a + b)", SUM),
    (LEAVES_ORPHANS + "def add(a, b): return a + b", {"test_list": ["assert add(3, 4) == 7"]}),
    (LEAVES_ORPHANS + "def add(a, b):\n    for n in list(range(3, 64)) * 1000:\n"
     "        try: os.write(n, b'x' * 2**16)\n        except OSError: pass",
     {"fn_name": "add", "inputs": [[3, 4]], "outputs": [7]}),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["bubblewrap", "unsafe"])
def test_whoever_waits_for_nobody_is_left_no_process(kind):
    """Like the first process of many a container: what loses its parent becomes the judge's."""
    script = (
        "import ctypes, json, sys\nfrom pathlib import Path\n"
        "from gapo_megatron.rewards.code import verify\n"
        "from gapo_megatron.rewards.sandbox import *\n"
        "PR_SET_CHILD_SUBREAPER = 36\n"
        "ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)\n"
        "outcomes, limits = [], json.loads(sys.argv[2])\n"
        "for program, tests in json.loads(sys.argv[1]):\n"
        "    response = f'```python\\n{program}\\n```'\n"
        f"    verdict = verify(response, json.dumps(tests), limits=limits, sandbox={kind!r})\n"
        "    outcomes.append(verdict.outcome)\n"
        # A judge that breaks off while the program runs.
        f"with start_sandbox(Limits(**limits), sandbox={kind!r}, python=SYSTEM_PYTHON) as box:\n"
        "    box.send({'program': 'import time\\ntime.sleep(3600)', 'prelude': ''})\n"
        "    box.send({'stdin': ''})\n"
        "left = [path.read_text() for path in Path('/proc/self/task').glob('*/children')]\n"
        "print(json.dumps([outcomes, ' '.join(left).split()]))"
    )
    asked = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            json.dumps(ENDINGS),
            json.dumps(PATIENT | {"output_mib": 1}),
        ],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    outcomes, left = json.loads(asked.stdout)
    assert outcomes == ["wrong", "wrong", "wrong", "correct", "correct", "wrong"]
    assert not left


def test_whoever_was_started_to_ignore_its_children_judges_as_ever():
    """Of an ignored child the kernel says neither that it ended nor how; and that is inherited."""
    script = (
        "import json, signal, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from gapo_megatron.rewards.code import verify\n"
        "from gapo_megatron.rewards.pool import Pool\n"
        "from gapo_megatron.rewards.sandbox import process\n"
        "process.END_TIMEOUT_S = 0.5\n"  # bubblewrap itself waits in vain
        "limits = json.loads(sys.argv[2])\n"
        "verdicts = [verify(*pair, limits=limits) for pair in json.loads(sys.argv[1])]\n"
        "with Pool('tests.reward_setup', num_workers=1, timeout_s=600) as pool:\n"
        "    [child] = pool.judge([('child', '')])\n"
        "print(json.dumps([[one.outcome for one in verdicts], child.reason]))"
    )
    programs = [READS + "print(a + b)", "1/0", "import os\nos.wait()"]
    pairs = [(fenced(program), json.dumps(SUM)) for program in programs]
    asked = subprocess.run(
        [sys.executable, "-c", script, json.dumps(pairs), json.dumps(PATIENT)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert json.loads(asked.stdout) == [["correct", "wrong", "wrong"], "3"]


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
    assert verify(response, tests, limits=long, sandbox=kind) == Verdict(Outcome.CORRECT)


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
    seldom = "module.WATCH_INTERVAL_S = 3600; module.main()()"
    original = process.start_command

    def start_command(*args, **options):
        return [part.replace("module.main()()", seldom) for part in original(*args, **options)]

    monkeypatch.setattr(process, "start_command", start_command)
    program = f"{BURNS}for _ in range(4): os.fork() or burn(0.5) or os._exit(0)\n"
    program += "for _ in range(4): os.wait()\nprint(7)"
    tests = json.dumps({"inputs": [""], "outputs": ["7"]})
    verdict = verify(fenced(program), tests, limits=PATIENT | {"cpu_s": 1})
    assert (verdict.outcome, "CPU time" in verdict.reason) == (Outcome.WRONG, True)


def test_honest_programs_find_what_they_need():
    program = """
import asyncio, concurrent.futures, fcntl, mmap, multiprocessing, select, shutil, signal, sqlite3
import subprocess, sys, tempfile
def f():
    yield subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
    with concurrent.futures.ThreadPoolExecutor(4) as pool: yield sum(pool.map(int, "123")) == 6
    yield sqlite3.connect(":memory:").execute("select 2").fetchone() == (2,)
    with tempfile.TemporaryFile() as file:
        file.write(b"x"); file.flush()
        yield mmap.mmap(file.fileno(), 1)[:] == b"x"
        with open("copy", "wb") as copy: file.seek(0); shutil.copyfileobj(file, copy)
        yield shutil.copyfile("copy", "again") == "again" and open("again").read() == "x"
        yield fcntl.fcntl(file, fcntl.F_GETFL) >= 0 and fcntl.fcntl(file, fcntl.F_DUPFD, 9) >= 9
    r, w = os.pipe()
    if os.fork() == 0: os.write(w, b"y"); os._exit(3)
    poll = select.epoll(); poll.register(r)
    yield poll.poll() and os.read(r, 1) == b"y" and os.waitstatus_to_exitcode(os.wait()[1]) == 3
    zeros = mmap.mmap(-1, 2**22, mmap.MAP_PRIVATE)
    with open("/dev/zero", "rb") as file: yield file.read(3) == zeros[:3]
    async def late(n): return await asyncio.sleep(0.01, n)
    async def both(): return await asyncio.gather(late(1), asyncio.to_thread(int, "2"))
    yield asyncio.run(both()) == [1, 2]
    one, other = multiprocessing.Pipe(); one.send("z"); yield other.recv() == "z"
    yield signal.getsignal(signal.SIGCHLD) == 0
    signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01)
    yield signal.pause() is None and signal.sigtimedwait({signal.SIGALRM}, 0) is None
import os
print([n for n, holds in enumerate(f()) if not holds])
"""
    assert judge(program, {"inputs": [""], "outputs": ["[]"]}) == Verdict(Outcome.CORRECT)


def test_no_number_goes_on_from_one_program_to_the_next():
    """From one test of a program to its next they do: docs/sandbox.md says why."""
    program = """
import os
print(os.getpid(), *(os.fstat(number).st_ino for number in range(3)))
for number in range(20):
    open(str(number), "w").close()
    if os.fork() == 0: os._exit(0)
    os.wait()
"""

    def numbers() -> list[dict[str, str]]:
        with ProcessSandbox(Limits(**PATIENT), kind="bubblewrap", python=SYSTEM_PYTHON) as box:
            box.send({"program": program, "prelude": ""})
            return [box.ask({"stdin": ""}) for _ in range(2)]

    first = numbers()
    assert first[0] != first[1]  # what is left there would be seen
    assert not first[0]["failure"] and numbers() == first


def test_no_memory_is_held_by_a_page_of_it():
    """Shared memory without a file lives as long as one page is mapped, and no look counts it."""
    program = """
import mmap, os
for number in (-1, os.open("/dev/zero", os.O_RDWR)):
    try: mmap.mmap(number, 2**20)
    except OSError: print("refused")
"""
    tests = {"inputs": [""], "outputs": ["refused refused"]}
    assert judge(program, tests) == Verdict(Outcome.CORRECT)


class Waits:
    """Stands in for the clock of sandboxes, and for `poll`: a wait takes what a test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.each_s = 0.0
        self.allowed_s: list[float] = []
        self.is_over = False

    def monotonic(self) -> float:
        return self.now

    def poll(self) -> SimpleNamespace:
        real = select.poll()

        def wait(milliseconds: float) -> list[tuple[int, int]]:
            self.allowed_s.append(milliseconds / 1000)
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
        num_waits = len(waits.allowed_s)
        waits.each_s, waits.is_over = 9, True
        with pytest.raises(ProgramError, match="50 s"):
            box.receive()
        assert len(waits.allowed_s) == num_waits + 2  # 49 s, 58 s


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


def test_the_pool_judges_programs_beside_one_that_hangs():
    good, slow = fenced(READS + "print(a + b)"), fenced("while True: pass")
    answer = json.dumps(SUM)
    options = {"limits": PATIENT | {"cpu_s": 2}}
    with Pool("gapo_megatron.rewards.code", num_workers=2, timeout_s=600, options=options) as pool:
        verdicts = pool.judge([(good, answer), (slow, answer), (good, answer), (good, answer)])
    outcomes = [verdict.outcome for verdict in verdicts]
    assert outcomes == [Outcome.CORRECT, Outcome.WRONG, Outcome.CORRECT, Outcome.CORRECT]


@pytest.mark.parametrize(
    ("setting", "kind", "place"),
    [
        ("bubblewrap", "bubblewrap", ""),
        ("unsafe", "unsafe", ""),
        ("apptainer:/images/python.sif", "apptainer", "/images/python.sif"),
        ("tcp://judge-1:7420", "service", "judge-1:7420"),
        ("tcp://[::1]:7420", "service", "[::1]:7420"),
    ],
)
def test_one_setting_names_the_sandbox_and_its_place(setting, kind, place):
    assert split_setting(setting) == (kind, place)
    assert RewardConfig(kind="code", sandbox=setting).sandbox == setting


@pytest.mark.parametrize(
    "setting",
    ["", "bwrap", "apptainer", "apptainer:python.sif", "tcp://judge", "tcp://:7420", "tcp:7420",
     "tcp://judge:x", "tcp://judge:99999", "tcp://judge:7420/x", "http://judge:7420"],
)  # fmt: skip
def test_a_sandbox_of_no_known_form_is_refused(setting):
    with pytest.raises(ValidationError, match="sandbox"):
        RewardConfig(kind="code", sandbox=setting)


def test_a_service_has_its_own_interpreter():
    with pytest.raises(ValidationError, match=r"python.*/x.*sandbox.*tcp:"):
        RewardConfig(kind="code", sandbox="tcp://judge:7420", python="/x")
