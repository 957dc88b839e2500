"""The sandbox of programs: what starts it, what ends it, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from gapo_megatron.config import RewardConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.code import verify
from gapo_megatron.rewards.pool import Pool
from gapo_megatron.rewards.sandbox import (
    SYSTEM_PYTHON,
    Limits,
    ProgramError,
    SandboxError,
    process,
    split_setting,
)
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.rewards.sandbox.inside.seccomp import compile_filter
from gapo_megatron.rewards.sandbox.process import ProcessSandbox
from gapo_megatron.types import Outcome, Verdict
from tests.sandbox_setup import needs_sandbox, processes_with

pytestmark = needs_sandbox

ROOT = Path(__file__).parents[1]
READS = "a, b = map(int, input().split())\n"
SUM = {"inputs": ["3 4\n", "10 20\n"], "outputs": ["7\n", "30\n"]}


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def judge(program: str, tests: object) -> Verdict:
    return verify(fenced(program), json.dumps(tests))


def test_verdicts_without_a_sandbox_are_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    verdict = judge(READS + "print(a + b)", SUM)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "the sandbox cannot start" in verdict.reason
    assert "bwrap" in verdict.reason


def test_a_sandbox_that_dies_says_nothing_about_the_program():
    with ProcessSandbox(Limits(), kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": "input()", "prelude": ""})
        os.killpg(box._process.pid, signal.SIGKILL)
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
        assert box._process.wait(timeout=60) == 0  # it cannot say why, and yet ends in order
        with pytest.raises(ProgramError, match="broke off"):
            box.receive()


def _wait_until_gone(marker: str) -> None:
    until = time.monotonic() + 60
    while processes_with(marker):
        assert time.monotonic() < until, "processes are left behind"
        time.sleep(0.02)


def test_nothing_is_left_of_a_sandbox_when_it_closes_or_its_judge_is_killed():
    limits = Limits(num_processes=17, disk_mib=61)  # recognised by its command line
    marker = f"{61 * 2**20}"
    with ProcessSandbox(limits, kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": "import os, time\nos.fork()\ntime.sleep(99)", "prelude": ""})
        box.send({"stdin": ""})
        time.sleep(0.2)
        assert processes_with(marker)
    _wait_until_gone(marker)

    program = "while True: pass"
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


def test_signals_of_the_job_do_not_reach_programs():
    tests = {"inputs": [""], "outputs": ["done"]}
    program = "import time\ntime.sleep(1)\nprint('done')"
    with ProcessSandbox(Limits(), kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": program, "prelude": ""})
        box.send({"stdin": tests["inputs"][0]})
        until = time.monotonic() + 60
        while len(tree := _tree(box._process.pid)) < 3:  # bubblewrap, ours, the program
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.2)  # so that the program has begun
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            for member in tree:
                os.kill(member, number)
        assert box.receive() == {"stdout": "done\n", "failure": ""}


def test_the_check_tries_the_walls():
    check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits(memory_mib=128))


def test_the_check_names_a_wall_that_is_missing(monkeypatch):
    unfiltered = "module.install_filter = int; module.main()()"
    original = process.start_command

    def start_command(*args, **options):
        return [part.replace("module.main()()", unfiltered) for part in original(*args, **options)]

    monkeypatch.setattr(process, "start_command", start_command)
    with pytest.raises(ConfigError, match="isolated on this machine: network sockets can be open"):
        check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits(memory_mib=128))


def test_the_check_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"reward\.sandbox .*bubblewrap.*bwrap.*the package"):
        check_sandbox(sandbox="bubblewrap", python=SYSTEM_PYTHON, limits=Limits())


def test_the_check_names_an_interpreter_that_is_not_there():
    with pytest.raises(ConfigError, match=r"reward\.python \('/nonexistent'\)"):
        check_sandbox(sandbox="bubblewrap", python="/nonexistent", limits=Limits())


def test_the_check_names_an_interpreter_that_programs_could_not_see(tmp_path):
    if not tmp_path.is_relative_to("/tmp"):
        pytest.skip("the tests' folder is not in /tmp")
    python = tmp_path / "python"
    python.symlink_to(SYSTEM_PYTHON)
    with pytest.raises(ConfigError, match=r"a /tmp of their own"):
        check_sandbox(sandbox="bubblewrap", python=str(python), limits=Limits())


def test_without_a_sandbox_programs_run_only_when_told_and_with_a_warning():
    with pytest.warns(UserWarning, match="WITH YOUR RIGHTS"):
        check_sandbox(sandbox="unsafe", python=sys.executable, limits=Limits(num_processes=2))
    answer = json.dumps(SUM)
    verdict = verify(
        fenced(READS + "print(a + b)"), answer, sandbox="unsafe", python=sys.executable
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
        assert processes_with(repr(seconds))
    assert not processes_with(repr(seconds))


def test_only_what_is_waited_for_the_program_is_its_time():
    limits = Limits(total_s=2, wall_s=2)
    with ProcessSandbox(limits, kind="bubblewrap", python=SYSTEM_PYTHON) as box:
        box.send({"program": "def f(s): __import__('time').sleep(s)", "prelude": ""})
        box.send({"calls": True})
        for seconds in (0, 0.8):
            assert box.ask({"function": ["f"], "args": [seconds], "kwargs": {}}) == {"value": None}
            time.sleep(1.5)
        with pytest.raises(ProgramError, match="longer than 2 s"):
            box.ask({"function": ["f"], "args": [1.9], "kwargs": {}})


def test_the_filter_names_each_architecture_and_no_other():
    assert len(compile_filter("x86_64")) == len(compile_filter("aarch64"))
    with pytest.raises(KeyError):
        compile_filter("riscv64")


def test_the_pool_judges_programs_beside_one_that_hangs():
    good, slow = fenced(READS + "print(a + b)"), fenced("while True: pass")
    answer = json.dumps(SUM)
    options = {"limits": {"cpu_s": 1, "wall_s": 10}}
    with Pool("gapo_megatron.rewards.code", num_workers=2, timeout_s=200, options=options) as pool:
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
    with pytest.raises(ValidationError, match=r"sandbox '.*' must be 'bubblewrap', 'apptainer:/"):
        RewardConfig(kind="code", sandbox=setting)


def test_a_service_has_its_own_interpreter():
    with pytest.raises(ValidationError, match=r"python \('/x'\) does not go with sandbox \('tcp:"):
        RewardConfig(kind="code", sandbox="tcp://judge:7420", python="/x")
