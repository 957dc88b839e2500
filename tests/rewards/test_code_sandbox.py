"""The sandbox of programs: what starts it, what ends it, and what is left of it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from gapo_megatron.config import RewardConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.code import verify
from gapo_megatron.rewards.pool import Pool
from gapo_megatron.rewards.processes import descendants
from gapo_megatron.rewards.sandbox import (
    SYSTEM_PYTHON,
    Limits,
    ProgramError,
    SandboxError,
    process,
    split_setting,
)
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.rewards.sandbox.inside import serve
from gapo_megatron.rewards.sandbox.process import ProcessSandbox
from gapo_megatron.types import Outcome, Verdict
from tests.hostile import read_programs
from tests.rewards.test_code_hostile import ASSERTS, CALL_TESTS
from tests.sandbox_setup import (
    CORRECT,
    PATIENT,
    SUM,
    fenced,
    judge,
    needs_sandbox,
    processes_with,
    wait_until_gone,
)
from tests.waiting import HANG_S, wait_until

pytestmark = needs_sandbox

ROOT = Path(__file__).parents[2]
NUM_PROCESSES = 4
"""Of a program with one child: bubblewrap, ours, the two."""
READS = "a, b = map(int, input().split())\n"


def run_first(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have the runner process execute this before its main function."""
    original = process.start_command

    def start_command(*args, **options):
        parts = original(*args, **options)
        return [part.replace("module.main()()", f"{code}; module.main()()") for part in parts]

    monkeypatch.setattr(process, "start_command", start_command)


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
    run_first(monkeypatch, "module._num_oom_kills = iter(range(9)).__next__")
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
        with pytest.raises(ProgramError, match="exited early"):
            box.receive()


@pytest.mark.parametrize("tests", [CALL_TESTS, ASSERTS])
def test_junk_beside_a_wrong_value_is_wrong_and_costs_the_judge_little(tests):
    """48 MB of text that would be 2 GB of lists."""
    ((_, reason, source),) = [one for one in read_programs("calls.txt") if "nested junk" in one[0]]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verdict = verify(f"```\n{source.replace('40_000', '390_000')}\n```", json.dumps(tests))
    assert verdict.outcome is Outcome.WRONG and re.search(reason, verdict.reason)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB


def test_nothing_is_left_of_a_sandbox_when_it_closes_or_its_judge_is_killed():
    limits = Limits(num_processes=17, disk_mib=61, **PATIENT)  # recognised by its command line
    marker = f"{61 * 2**20}"
    with ProcessSandbox(limits, kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": "import os, time\nos.fork()\ntime.sleep(3600)", "prelude": ""})
        box.send({"stdin": ""})
        _wait_for_child(box)
        assert processes_with(marker)
    wait_until_gone(marker)

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
    wait_until_gone(marker)


def _wait_for_child(box: ProcessSandbox) -> list[int]:
    """The sandbox's processes, the program's child last, once it has one."""

    def grown() -> list[int]:  # bubblewrap, ours, the program, its child
        root = box._process.pid
        tree = [root, *map(int, descendants(root))]
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
        assert box.receive() == {"stdout": "-9\n", "stderr": "", "failure": ""}


def test_the_check_tries_the_walls():
    check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits(memory_mib=128))


def test_the_check_names_a_wall_that_is_missing(monkeypatch):
    run_first(monkeypatch, "module.install_filter = int")
    with pytest.raises(ConfigError, match="sockets"):
        check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits(memory_mib=128))


def test_the_check_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"reward\.sandbox .*bwrap"):
        check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits())


@pytest.mark.parametrize("python", ["/nonexistent", "/bin/echo"])
def test_the_check_names_an_interpreter_that_is_none(python):
    with pytest.raises(ConfigError, match=rf"reward\.python \('{python}'\): .*{python} "):
        check_sandbox(sandbox="bubblewrap", python=python, limits=Limits())


def test_the_check_names_an_interpreter_that_programs_could_not_see(tmp_path):
    if not tmp_path.is_relative_to("/tmp"):
        pytest.skip("the tests' folder is not in /tmp")
    python = tmp_path / "python"
    python.symlink_to(SYSTEM_PYTHON)
    with pytest.raises(ConfigError, match="private /tmp"):
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
    assert verdict == CORRECT


def test_without_a_namespace_nothing_is_left_of_a_program_either():
    seconds = 300 + os.getpid() / 2**23  # recognised by its command line
    program = f"import os, time\nos.execlp('sleep', 'sleep', '{seconds!r}')"
    limits = Limits(wall_s=1)
    with ProcessSandbox(limits, kind="unsafe", python=SYSTEM_PYTHON) as box:
        box.send({"program": program, "prelude": ""})
        with pytest.raises(ProgramError, match="longer than 1 s"):
            box.ask({"stdin": ""})
        wait_until(lambda: processes_with(repr(seconds)), "the program's other command line")
    wait_until_gone(repr(seconds))


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
    yield len(str(10**5000)) == 5001 and int("9" * 5000) + 1 == 10**5000
import os
print([n for n, holds in enumerate(f()) if not holds])
"""
    assert judge(program, {"inputs": [""], "outputs": ["[]"]}) == CORRECT


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
    assert judge(program, tests) == CORRECT


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
        ("https://judge-1:7420", "service", "https://judge-1:7420"),
        ("https://[::1]:7420", "service", "https://[::1]:7420"),
        ("sandboxfusion:http://fusion", "sandboxfusion", "http://fusion"),
        ("sandboxfusion:https://f:80/a/b/", "sandboxfusion", "https://f:80/a/b"),
    ],
)
def test_one_setting_names_the_sandbox_and_its_place(setting, kind, place):
    assert split_setting(setting) == (kind, place)
    assert RewardConfig(kind="code", sandbox=setting).sandbox == setting


@pytest.mark.parametrize(
    "setting",
    ["", "bwrap", "apptainer", "apptainer:python.sif", "https://judge", "https://:7420",
     "https:7420", "https://judge:x", "https://judge:99999", "https://judge:7420/x",
     "http://judge:7420", "sandboxfusion:", "sandboxfusion:judge:80",
     "sandboxfusion:http://judge:0", "sandboxfusion:ftp://judge", "sandboxfusion:http://a@judge"],
)  # fmt: skip
def test_a_sandbox_of_no_known_form_is_refused(setting):
    with pytest.raises(ValidationError, match="sandbox"):
        RewardConfig(kind="code", sandbox=setting)


@pytest.mark.parametrize("sandbox", ["https://judge:7420", "sandboxfusion:http://judge"])
def test_a_service_has_its_own_interpreter(sandbox):
    with pytest.raises(ValidationError, match=rf"python.*/x.*sandbox.*{sandbox}"):
        RewardConfig(kind="code", sandbox=sandbox, python="/x")


def test_a_process_that_becomes_readable_while_it_is_asked_does_not_hide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves the session of `serve` between the refused look and the next question."""
    sessions = {0: 1, os.getpid(): 1}

    def refuse(*_: object) -> None:
        sessions[os.getpid()] = 2
        raise PermissionError

    monkeypatch.setattr(serve, "open", refuse, raising=False)
    monkeypatch.setattr(os, "getsid", sessions.__getitem__)
    assert serve._num_mappings(str(os.getpid())) == 0
    assert serve._num_mappings(str(os.getpid())) > serve.MAX_MAPPINGS  # it had left before
