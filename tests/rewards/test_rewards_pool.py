"""The pool of workers: whatever a verifier does to its worker, every item gets its verdict."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gapo_megatron.errors import RewardError, printable
from gapo_megatron.rewards import Pool, worker_process
from gapo_megatron.rewards import pool as module
from gapo_megatron.rewards.processes import descendants
from gapo_megatron.types import Outcome, Verdict
from tests.messages import mentions
from tests.sandbox_setup import needs_sandbox
from tests.waiting import HANG_S, wait_for, wait_until

OBEDIENT = "tests.reward_setup"
PATIENCE_S = 600
"""Only what never ends takes longer, on a busy machine too."""


@pytest.fixture(scope="module")
def pool():
    with Pool(OBEDIENT, num_workers=2, timeout_s=PATIENCE_S) as pool:
        pool.wait_until_ready()
        yield pool


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The pool's: time passes only where a test sets `now`, and its workers' only in `cpu_s`."""
    clock = SimpleNamespace(now=0.0, cpu_s=0.0)
    for one in (module, worker_process):
        monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for name in ("cpu_s", "cpu_s_of_all"):
        monkeypatch.setattr(worker_process, name, lambda pid: clock.cpu_s)
    return clock


def _pids(pool: Pool) -> set[int]:
    return {worker.process.pid for worker in pool._workers}


def _exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_for_end(pids: set[int]) -> None:
    wait_until(lambda: not any(map(_exists, pids)), f"the end of {pids}")


def test_verdicts_come_in_order_whoever_finishes_first(pool):
    items = [("sleep 0.3", "")] + [(f"echo {number}", str(-number)) for number in range(200)]
    verdicts = pool.judge(items)
    assert verdicts[0].outcome is Outcome.CORRECT
    assert [verdict.reason for verdict in verdicts[1:]] == [f"{n} for {-n}" for n in range(200)]


def test_responses_of_any_size_and_any_text_arrive_whole(pool):
    text = "\x00\n\r\u2028\ud7ff\U0001f600\\ \"'" * 400_000  # more than any buffer holds
    verdicts = pool.judge([(f"echo {len(text)}", text[:40]), (text, ""), ("echo \n", "\n")])
    assert verdicts[0].reason == printable(f"{len(text)} for {text[:40]}")
    assert verdicts[2].reason == r"\n for \n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("hang", "0.5 s"),
        ("exit", "exit code 3"),
        ("kill", "SIGKILL"),  # as the kernel does when memory runs out
        ("segfault", "SIGSEGV"),
        ("flood", "65536 bytes"),
        ("babble", "other than its verdict"),
        ("nest", "other than its verdict"),
    ],
)
def test_a_worker_that_fails_is_replaced_and_its_item_unknown(pool, command, reason, monkeypatch):
    take = worker_process.Worker.take

    def impatient(worker, index, item, *, timeout_s):
        take(worker, index, item, timeout_s=0.5 if item[0] == "hang" else timeout_s)

    monkeypatch.setattr(worker_process.Worker, "take", impatient)
    before = _pids(pool)
    # The failure among others, on both sides of it, all of which must be judged as ever.
    items = [(f"echo {number}", "") for number in range(20)]
    items[7] = (command, "")
    verdicts = pool.judge(items)
    assert verdicts[7].outcome is Outcome.UNKNOWN
    assert reason in verdicts[7].reason
    others = [verdict.reason for index, verdict in enumerate(verdicts) if index != 7]
    assert others == [f"{index} for " for index in range(20) if index != 7]
    assert len(before - _pids(pool)) == 1
    _wait_for_end(before - _pids(pool))
    # The one in its place works.
    pool.wait_until_ready()
    served = {verdict.reason for verdict in pool.judge([("sleep 0.05", ""), ("pid", "")] * 10)}
    assert served - {""} <= {str(pid) for pid in _pids(pool)}


def test_every_worker_may_fail_at_once_and_again(pool):
    verdicts = pool.judge([("exit", "")] * 6 + [("echo last", "")])
    assert all("exit code 3" in verdict.reason for verdict in verdicts[:6])
    assert verdicts[6].reason == "last for "


def test_a_worker_has_options_prints_nothing_cuts_reasons_and_imports_no_torch(capfd):
    options = {"suffix": "!"}
    with Pool(OBEDIENT, num_workers=1, timeout_s=PATIENCE_S, options=options) as pool:
        items = [("print", ""), ("echo a", "b"), ("reason", ""), ("torch", "")]
        reasons = [verdict.reason for verdict in pool.judge(items)]
    assert reasons == ["", "a for b!", "x" * 500, "False"]
    assert capfd.readouterr() == ("", "")


def test_a_verdict_forged_for_another_item_does_not_count(pool):
    # Item 0 is judged by the other worker, or was; this one answers for it in vain.
    verdicts = pool.judge([("echo zero", ""), ("forge", "")])
    assert verdicts[0].reason == "zero for "
    assert "other than its verdict" in verdicts[1].reason


def test_waiting_for_a_worker_does_not_count_as_judging(clock, monkeypatch):
    rest = worker_process.Worker.rest

    def late(worker):
        rest(worker)
        clock.now += 100

    monkeypatch.setattr(worker_process.Worker, "rest", late)
    with Pool(OBEDIENT, num_workers=1, timeout_s=150) as pool:
        # Nothing is ready yet, and the last has waited for 300 s: longer than any of them may take.
        verdicts = pool.judge([("sleep 0", "")] * 3)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.CORRECT}
    assert clock.now == 400


@pytest.mark.parametrize(
    ("cpu_before", "in_time", "late", "reason"),
    [
        # It sleeps.
        (0, [(150, 0)], (0.1, 0), "1% of a CPU"),
        # It has a hundredth of the machine: only its own time counts, without what it took before.
        (40, [(100, 1)] * 150, (0.6, 0.1), "of CPU time"),
        # It computes, and then sleeps.
        (0, [(140, 100), (150, 0)], (0.1, 0), "1% of a CPU"),
        # It wakes now and then.
        (0, [(1, 0.009)] * 149, (1.1, 0), "1% of a CPU"),
    ],
)
def test_an_item_is_late_when_its_time_is_over_and_no_sooner(
    clock, tmp_path, cpu_before, in_time, late, reason
):
    with Pool(OBEDIENT, num_workers=1, timeout_s=150) as pool:
        pool.wait_until_ready()
        clock.cpu_s = cpu_before
        pool.submit([(f"await {tmp_path}/go", "")])
        pool.poll()

        def pass_time(seconds: float, cpu_s: float) -> list[Verdict]:
            clock.now, clock.cpu_s = clock.now + seconds, clock.cpu_s + cpu_s
            return [*pool._settle().values()]

        assert not any(pass_time(*step) for step in in_time)
        [verdict] = pass_time(*late)
    assert verdict.outcome is Outcome.UNKNOWN
    assert reason in verdict.reason and "150 s" in verdict.reason


def test_a_worker_computes_where_a_process_that_it_started_does(tmp_path):
    loop = [sys.executable, "-c", "print(flush=True)\nwhile 1: pass"]
    program = f"import subprocess\nsubprocess.run({loop})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout and process.stdout.readline()
            before = worker_process.cpu_s_of_all(process.pid)
            wait_until(
                lambda: worker_process.cpu_s_of_all(process.pid) > before + 0.05,
                "what the child computes",
            )
            assert worker_process.cpu_s(process.pid) < before + 0.05
        finally:
            for one in (*map(int, descendants(process.pid)), process.pid):
                os.kill(one, signal.SIGKILL)


def test_the_pool_wakes_to_look_at_a_worker_that_says_nothing(clock, tmp_path, monkeypatch):
    with Pool(OBEDIENT, num_workers=1, timeout_s=150) as pool:
        pool.wait_until_ready()
        select, pools_thread = module.selectors.DefaultSelector.select, threading.current_thread()
        timeouts = []

        def passing(selector, timeout=None):
            if threading.current_thread() is not pools_thread:  # an event loop of another test
                return select(selector, timeout)
            timeouts.append(timeout)
            clock.now += timeout + 0.01
            clock.cpu_s += timeout + 0.01
            return select(selector, 0)

        monkeypatch.setattr(module.selectors.DefaultSelector, "select", passing)
        [verdict] = pool.judge([(f"await {tmp_path}/never", "")])
    assert "CPU" in verdict.reason and max(timeouts) < 1.5 * worker_process.LOOK_S
    assert 150 < clock.cpu_s < 150 + 2 * worker_process.LOOK_S


COMPUTES = """```python
import time
while time.process_time() < 1: pass
print(input())
```"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("verifier", "timeout_s", "options", "item", "outcome"),
    [
        (OBEDIENT, 2, {}, ("compute 1", ""), Outcome.CORRECT),
        (
            "gapo_megatron.rewards.math",
            10,
            {},
            (r"\boxed{2^x=x^2+\sin x}", "x^2=2^x"),
            Outcome.WRONG,
        ),
        pytest.param(
            "gapo_megatron.rewards.code",
            60,
            {"limits": {"wall_s": 3, "total_s": 3}},
            (COMPUTES, json.dumps({"inputs": ["7"], "outputs": ["7"]})),
            Outcome.CORRECT,
            marks=needs_sandbox,
        ),
    ],
)
def test_a_busy_machine_changes_no_verdict(verifier, timeout_s, options, item, outcome):
    """One CPU, on which twenty other processes compute: a second of it takes twenty."""
    cpus = os.sched_getaffinity(0)
    busy, verdicts = [], []
    try:
        os.sched_setaffinity(0, {min(cpus)})
        pools = [
            Pool(verifier, num_workers=1, timeout_s=timeout_s, options=options) for _ in range(2)
        ]
        with pools[0], pools[1]:
            for pool in pools:
                pool.wait_until_ready()
            verdicts += pools[0].judge([item])
            # Each in a session of its own, as the worker: the kernel may share time by session.
            loop = [sys.executable, "-c", "while 1: pass"]
            busy += [subprocess.Popen(loop, start_new_session=True) for _ in range(20)]
            verdicts += pools[1].judge([item])
    finally:
        os.sched_setaffinity(0, cpus)
        for process in busy:
            process.kill()
            process.wait()
    assert [verdict.outcome for verdict in verdicts] == [outcome, outcome]


def _poll_until_judged(pool: Pool) -> None:
    def is_judged() -> bool:
        pool.poll()
        return not pool._open

    wait_until(is_judged, "verdicts on all that was submitted")


def test_items_are_judged_between_polls_and_collected_in_any_order(pool, monkeypatch):
    numbers = pool.submit([(f"echo {n}", "a") for n in range(10)])
    _poll_until_judged(pool)
    numbers += pool.submit([("echo last", "b")])
    _poll_until_judged(pool)
    monkeypatch.setattr(pool, "_wait", lambda _: pytest.fail("waited for what is there"))
    reasons = [verdict.reason for verdict in pool.collect(numbers[::-1])]
    assert reasons == ["last for b", *(f"{n} for a" for n in reversed(range(10)))]
    assert pool.collect([]) == []


def test_what_is_not_collected_is_dropped_whether_begun_or_waiting(tmp_path):
    with Pool(OBEDIENT, num_workers=1, timeout_s=PATIENCE_S) as pool:
        pool.wait_until_ready()
        pool.submit([(f"await {tmp_path}/go", "")])
        pool.poll()
        never = (f"await {tmp_path}/never", "")
        [_, number, _] = pool.submit([never, ("echo it", ""), never])
        (tmp_path / "go").touch()  # of the first: nobody wants to know
        [verdict] = pool.collect([number])
        assert verdict.reason == "it for "
        pool.submit([never])  # and never collected, as of a generation that is broken off
        assert [one.reason for one in pool.judge([("echo", "new")])] == [" for new"]


@pytest.mark.parametrize(("command", "reason"), [("exit", "exit code 3"), ("hang", "150 s")])
def test_a_worker_that_fails_between_polls_is_replaced_there(clock, command, reason):
    with Pool(OBEDIENT, num_workers=1, timeout_s=150) as pool:
        pool.wait_until_ready()
        before = _pids(pool)
        numbers = pool.submit([(command, ""), ("echo it", "")])
        pool.poll()
        if command == "hang":
            clock.now, clock.cpu_s = clock.now + 150.1, clock.cpu_s + 150.1
        _poll_until_judged(pool)
        assert not _pids(pool) & before
        failed, other = pool.collect(numbers)
    assert failed.outcome is Outcome.UNKNOWN and reason in failed.reason
    assert other.reason == "it for "


def test_time_in_which_nobody_sends_does_not_count(clock):
    """Between polls an engine generates; an answer with tests may not fit into the channel."""
    text = "x" * 4_000_000
    with Pool(OBEDIENT, num_workers=1, timeout_s=150) as pool:
        pool.wait_until_ready()
        [worker] = pool._workers
        numbers = pool.submit([(f"echo {len(text)}", text)])
        pool.poll()
        while worker.outbox:
            wait_for(worker.channel, selectors.EVENT_WRITE)
            clock.now += 140
            pool.poll()
        assert clock.now > 300
        [verdict] = pool.collect(numbers)
    assert verdict.outcome is Outcome.WRONG and verdict.reason.startswith(f"{len(text)} for x")


def test_a_worker_killed_between_two_batches_or_in_its_start_is_replaced_and_no_item_lost():
    with Pool(OBEDIENT, num_workers=1, timeout_s=PATIENCE_S) as pool:
        [before] = pool.judge([("pid", "")])
        for _ in range(3):
            os.kill(pool._workers[0].process.pid, signal.SIGKILL)
            pool._workers[0].process.wait()
            pool._settle()
        [after] = pool.judge([("pid", "")])
    assert after.outcome is Outcome.CORRECT
    assert after.reason != before.reason


@pytest.mark.parametrize(("question_s", "least"), [(0.01, 3), (PATIENCE_S, 0)])
def test_it_is_asked_whether_to_go_on_while_it_judges_and_when_it_has(
    monkeypatch, tmp_path, question_s, least
):
    monkeypatch.setattr(module, "QUESTION_S", question_s)
    go = tmp_path / "go"
    if not least:
        go.touch()
    answers = iter([False, False, True])  # of the end: others are still judging
    questions = []

    def may_end(is_done: bool) -> bool:
        questions.append(is_done)
        if questions.count(False) == least:
            go.touch()
        return is_done and next(answers)

    with Pool(OBEDIENT, num_workers=2, timeout_s=PATIENCE_S) as pool:
        pool.wait_until_ready()
        items = [(f"await {go}", ""), ("1", ""), ("echo", "")]
        outcomes = [one.outcome for one in pool.judge(items, may_end=may_end)]
    assert outcomes == [Outcome.CORRECT, Outcome.UNKNOWN, Outcome.WRONG]
    assert questions.count(False) >= least
    assert least or not questions.count(False)
    assert questions[-3:] == [True] * 3 and questions.count(True) == 3


def test_what_was_broken_off_is_no_verdict_on_what_follows(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "QUESTION_S", 0.01)

    def stop(_: bool) -> bool:
        raise InterruptedError

    with Pool(OBEDIENT, num_workers=1, timeout_s=PATIENCE_S) as pool:
        pool.wait_until_ready()
        with pytest.raises(InterruptedError):
            pool.judge([(f"await {tmp_path}/{name}", "") for name in ("go", "never")], may_end=stop)
        (tmp_path / "go").touch()
        numbers = pool.submit([("echo new", "it")])
        _poll_until_judged(pool)
        assert pool.collect(numbers)[0].reason == "new for it"


def test_a_stopped_worker_is_given_up():
    with Pool(OBEDIENT, num_workers=1, timeout_s=1) as pool:
        pool.wait_until_ready()
        os.kill(pool._workers[0].process.pid, signal.SIGSTOP)
        assert "1 s" in pool.judge([("echo", "")])[0].reason


@pytest.mark.parametrize("verifier", ["no_such_module", "json"])
def test_a_verifier_that_cannot_start_is_an_error(verifier, capfd):
    with Pool(verifier, num_workers=2, timeout_s=1) as pool:
        with pytest.raises(RewardError, match=rf"{verifier}.*start.*code 1"):
            pool.wait_until_ready()
        with pytest.raises(RewardError, match="start"):
            pool.judge([("echo", "")])
    assert "Error: " in capfd.readouterr().err  # the worker's own, for the user to see


def test_a_worker_that_was_ready_in_time_is_not_late_because_nobody_listened(clock):
    with Pool(OBEDIENT, num_workers=1, timeout_s=PATIENCE_S) as pool:  # then the model is built ...
        wait_for(pool._workers[0].channel, selectors.EVENT_READ)
        clock.now += 2 * worker_process.START_TIMEOUT_S
        pool.wait_until_ready()


def test_workers_that_are_never_ready_are_an_error(clock, monkeypatch, tmp_path):
    (tmp_path / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Pool("endless", num_workers=1, timeout_s=PATIENCE_S) as pool:
        for _ in range(module.MAX_FAILED_STARTS):
            clock.now += worker_process.START_TIMEOUT_S
            before = _pids(pool)
            pool._settle()
            assert _pids(pool) == before  # it is not late yet
            clock.now += 0.1
            pool._settle()
            assert not _pids(pool) & before
        clock.now += worker_process.START_TIMEOUT_S + 0.1
        with pytest.raises(RewardError, match=mentions("endless", "start", "300 s")):
            pool.wait_until_ready()


def test_closing_leaves_no_process():
    with Pool(OBEDIENT, num_workers=2, timeout_s=PATIENCE_S) as pool:
        pool.wait_until_ready()
        pids = _pids(pool)
        assert all(map(_exists, pids))
    assert not any(map(_exists, pids))
    pool.close()


# A trainer whose workers are: idle, at their import, and in an instruction that never ends.
TRAINER = """
import sys
from gapo_megatron.rewards import Pool
idle, hanging = (Pool("tests.reward_setup", num_workers=1, timeout_s=3600) for _ in range(2))
idle.wait_until_ready(); hanging.wait_until_ready()
starting = Pool("tests.reward_setup", num_workers=1, timeout_s=3600)
print(*(p._workers[0].process.pid for p in (idle, hanging, starting)), flush=True)
hanging.judge([("hang", "")])
"""


@pytest.fixture
def trainer() -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """It, and its three workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        idle, hanging, starting = map(int, process.stdout.readline().split())
        yield process, [idle, hanging, starting]
    finally:
        process.kill()
        process.wait()


def _signals(pid: int, field: str) -> set[int]:
    """Those of a mask of /proc/PID/status: SigBlk, SigCgt, ..."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(re.search(rf"^{field}:\s*(\w+)", status, re.MULTILINE)[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_workers_end_with_a_trainer_that_is_killed(trainer):
    process, pids = trainer
    process.kill()
    _, errors = process.communicate(timeout=HANG_S)
    _wait_for_end(set(pids))
    assert errors == ""


def test_signals_to_the_whole_job_are_the_trainers_alone(trainer):
    process, pids = trainer
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    for pid in pids:  # Slurm signals every process of the job, wherever it is
        for number in numbers:
            os.kill(pid, number)
    # The last of them begins with the signals blocked. Those that are pending would end it now.
    wait_until(
        lambda: all(numbers <= _signals(pid, "SigCgt") - _signals(pid, "SigBlk") for pid in pids),
        "the workers' handlers",
    )
    assert all(map(_exists, pids))
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
    _, errors = process.communicate(timeout=HANG_S)
    _wait_for_end(set(pids))
    # One traceback, the trainer's own.
    assert len(re.findall("Traceback", errors)) == 1
    assert errors.strip().endswith("KeyboardInterrupt")
