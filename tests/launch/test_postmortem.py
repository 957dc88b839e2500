"""What failed first, told from attempt folders.

The texts of srun are what Slurm 22.05.8 and 24.11.5 print for the fault that a test names, on two
nodes of two tasks, by `srun --kill-on-bad-exit=1 --wait=3`. Stacks and errors of communication are
those of an all_reduce over gloo there; memory limits and NCCL are quoted from reports of others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gapo_megatron.launch.postmortem import main
from tests.full_disk import full_disk
from tests.messages import mentions

ROOT = Path(__file__).parents[2]

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:16554. This is typically caused by a remote worker crashing."
)
TIMED_OUT = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
    "waiting 3000ms for recv operation to complete"
)
TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/gapo_megatron/gapo_megatron/run/processes.py", line 290, in fail_fast
    yield
  File "/home/me/gapo_megatron/gapo_megatron/learn/update.py", line 88, in update
    self.optimizer.step()
  File "/home/me/gapo_megatron/.venv/lib64/site-packages/torch/optim/adamw.py", line 5, in step
    work()
"""
STACK = """\
Thread 0x00007f370b9ce6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

{kind} 0x00007f370c9ceb80 (most recent call first):
{frames}
  File "/runs/code/12/gapo_megatron/train.py", line 300 in <module>
"""
IN_ALL_REDUCE = """\
  File "/opt/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/runs/code/12/gapo_megatron/learn/update.py", line 120 in update"""
IN_READ = """\
  File "/usr/lib/python3.11/socket.py", line 718 in readinto
  File "/runs/code/12/gapo_megatron/data/source.py", line 44 in next_batch"""

AT_STEP = "step (torch/optim/adamw.py:5) < update (gapo_megatron/learn/update.py:88)"
AT_READ = "readinto (socket.py:718) < next_batch (gapo_megatron/data/source.py:44)"
AT_ALL_REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py:3252) < "
    "update (gapo_megatron/learn/update.py:120)"
)


def stack(frames: str, kind: str = "Thread") -> str:
    return STACK.format(kind=kind, frames=frames)


class Attempt:
    """An attempt's folder, and what the program says of it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def launch(self, text: str) -> None:
        (self.folder / "launch.log").write_text(text)

    def log(self, rank: int, text: str) -> None:
        (self.folder / f"rank_{rank}.log").write_text(text)

    def failure(
        self,
        rank: int,
        error: str,
        message: str,
        *,
        unix_s: float = 1000.0,
        exit_code: int = 1,
        host: str = "vm",
    ) -> None:
        record = {"rank": rank, "host": host, "unix_s": unix_s, "exit_code": exit_code}
        record |= {"error": error, "message": message, "traceback": TRACEBACK}
        (self.folder / f"failure_{rank}.json").write_text(json.dumps(record))

    def told(self, *, code: int = 0) -> tuple[str, list[str]]:
        """The first line, which names what failed first, and the others; it exits with `code`."""
        assert main([str(self.folder)]) == code
        first, *rest = self.capsys.readouterr().out.replace(str(self.folder), "A").splitlines()
        return first, [line.strip() for line in rest]


def names(line: str, *parts: object) -> bool:
    return re.search(mentions(*parts), line) is not None


@pytest.fixture
def attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Attempt:
    return Attempt(tmp_path, capsys)


# --- an error of one rank -------------------------------------------------------------------------


def test_the_error_of_one_rank_among_its_victims(attempt: Attempt) -> None:
    attempt.launch(
        "srun: error: node2: task 3: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
        "srun: error: node2: task 2: Exited with exit code 1\n"
        "srun: error: node1: tasks 0-1: Terminated\n"
        "srun: Force Terminated StepId=1.0\n"
    )
    attempt.failure(3, "DivergenceError", "loss is nan at step 7", unix_s=1000.5, host="node2")
    # Later, though by its node's clock earlier.
    attempt.failure(2, "RuntimeError", CLOSED, unix_s=990.0)
    attempt.log(0, stack(IN_ALL_REDUCE, "Current thread"))
    first, (place, log) = attempt.told()
    assert names(first, "rank 3", "node2", "DivergenceError: loss is nan at step 7")
    assert AT_STEP in place and "A/rank_3.log" in log


@pytest.mark.parametrize(
    ("launch", "unix_s"),
    [
        ("srun: error: node2: task 2: Exited with exit code 1\n", 2000.0),
        ("srun: error: node1: tasks 0-2: Exited with exit code 1\n", 999.0),
    ],
    ids=["the order of launch.log", "within one line, time"],
)
def test_what_decides_who_was_first(attempt: Attempt, launch: str, unix_s: float) -> None:
    later = "srun: Terminating StepId=1.0\nsrun: error: node1: task 0: Exited with exit code 1\n"
    attempt.launch(launch + later * ("task 2" in launch))
    attempt.failure(2, "OSError", "disk full", unix_s=unix_s)
    attempt.failure(0, "ValueError", "bad token", unix_s=1000.0)
    assert names(attempt.told()[0], "rank 2", "OSError: disk full")


def test_without_launch_log_time_decides(attempt: Attempt) -> None:
    attempt.failure(0, "RuntimeError", CLOSED, unix_s=998.0)
    attempt.failure(1, "ValueError", "later", unix_s=1001.0)
    attempt.failure(2, "OSError", "disk full", unix_s=999.0, host="node9")
    (attempt.folder / "failure_3.json").write_text('{"rank": 3, "ho')  # the disk was full
    assert names(attempt.told()[0], "rank 2", "node9", "OSError: disk full")


def test_a_mistake_in_the_config_is_not_retried(attempt: Attempt) -> None:
    attempt.launch(
        "srun: error: 127.0.0.3: tasks 2-3: Exited with exit code 2\n"
        "srun: Terminating StepId=10.0\n"
        "srun: error: 127.0.0.2: tasks 0-1: Exited with exit code 2\n"
    )
    for rank in range(4):
        message = "data.train_path (x.jsonl) is not a file"
        attempt.failure(rank, "ConfigError", message, unix_s=1000.0 - rank, exit_code=2)
    first, (place, others, log) = attempt.told(code=4)
    assert names(first, "rank 3", "127.0.0.3", f"ConfigError: {message}")
    assert AT_STEP in place and "ranks 0-3" in others and "A/rank_3.log" in log


# --- signals --------------------------------------------------------------------------------------

KILLED = """\
srun: error: 127.0.0.3: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: 127.0.0.3: task 3: Exited with exit code 1
srun: error: 127.0.0.2: tasks 0-1: Exited with exit code 1
srun: Force Terminated StepId=1.0
"""
FORCED = """\
srun: error: 127.0.0.2: tasks 0-1: Exited with exit code 1
srun: Terminating StepId=1.0
srun: error: 127.0.0.3: task 3: Exited with exit code 1
srun: Job step aborted: Waiting up to 5 seconds for job step to finish.
srun: error: 127.0.0.3: task 2: Killed
"""


def test_a_rank_that_got_time_to_show_its_stack_was_killed_for_another(attempt: Attempt) -> None:
    attempt.launch(FORCED)
    for rank in (0, 1, 3):
        attempt.failure(rank, "RuntimeError", TIMED_OUT)
    attempt.log(2, stack(IN_READ, "Current thread"))
    assert "lost connections" in attempt.told()[0]


@pytest.mark.parametrize("launch", [KILLED, FORCED], ids=["told first", "told last"])
def test_a_killed_rank_beats_the_errors_it_causes(attempt: Attempt, launch: str) -> None:
    attempt.launch(launch)
    for rank in (0, 1, 3):
        attempt.failure(rank, "RuntimeError", CLOSED)
    attempt.log(2, "step 3\nstep 4\n\n")
    first, (hint, log, *last) = attempt.told()
    assert names(first, "rank 2", "127.0.0.3", "Killed")
    assert names(hint, "memory", "dmesg") and "A/rank_2.log" in log
    assert last == ["| step 3", "| step 4"]


def test_out_of_memory_of_the_job(attempt: Attempt) -> None:
    attempt.launch("srun: error: o0616: task 5: Out Of Memory\nsrun: Terminating StepId=9.0\n")
    said = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. "
        "Some of the step tasks have been OOM Killed."
    )
    attempt.log(4, said + "\n")
    first, (hint, log) = attempt.told()
    assert names(first, "rank 5", "o0616", "Out Of Memory")
    assert hint == said and "A/rank_5.log" in log


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: 127.0.0.3: task 3: Segmentation fault\n",
        "srun: error: 127.0.0.3: task 3: Segmentation fault (core dumped)\n",
        "task 3: Exited with exit code 139\n",  # without Slurm, told by a shell
    ],
)
def test_a_crash_shows_where(attempt: Attempt, line: str) -> None:
    attempt.launch(line + "task 0: Terminated\n")
    crash = "Fatal Python error: Segmentation fault\n\n" + stack(IN_READ, "Current thread")
    attempt.log(3, "step 1\n" + crash)
    first, (place, *_) = attempt.told()
    assert names(first, "rank 3", "Segmentation fault") and AT_READ in place


def test_an_abort_of_nccls_watchdog_is_a_victims(attempt: Attempt) -> None:
    attempt.launch(
        "srun: error: node1: task 0: Aborted (core dumped)\n"
        "srun: Terminating StepId=1.0\n"
        "srun: error: node2: task 1: Exited with exit code 1\n"
    )
    attempt.log(0, "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n")
    attempt.failure(1, "OSError", "stale file handle")
    assert names(attempt.told()[0], "rank 1", "node2", "OSError: stale file handle")


# --- all ranks at once ----------------------------------------------------------------------------


def test_a_hang_shows_which_rank_is_not_where_the_others_are(attempt: Attempt) -> None:
    attempt.launch(
        "srun: error: 127.0.0.2: task 0: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
        "srun: error: 127.0.0.2: task 1: Exited with exit code 1\n"
        "srun: error: 127.0.0.3: tasks 2-3: Terminated\n"
    )
    attempt.log(0, "step 1\nTimeout (0:30:00)!\n" + stack(IN_ALL_REDUCE))
    attempt.failure(1, "RuntimeError", CLOSED)
    attempt.log(2, stack(IN_READ, "Current thread"))
    attempt.log(3, stack(IN_ALL_REDUCE, "Current thread"))
    first, (_, *places, logs) = attempt.told()
    assert names(first, "hang", "0:30:00", "rank 0", "127.0.0.2")
    assert [place.partition(": ")[0] for place in places] == ["rank 1", "rank 2", "ranks 0,3"]
    assert names(places[0], "RuntimeError", AT_STEP)
    assert AT_READ in places[1] and AT_ALL_REDUCE in places[2]
    assert "A/rank_*.log" in logs


def test_ranks_that_lost_each_other(attempt: Attempt) -> None:
    attempt.launch(
        "srun: error: 127.0.0.2: tasks 0-1: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=2.0\n"
        "srun: error: 127.0.0.3: task 3: Exited with exit code 1\n"
        "srun: error: 127.0.0.3: task 2: Terminated\n"
        "srun: Force Terminated StepId=2.0\n"
    )
    for rank, unix_s in ((0, 2.2), (1, 2.1), (3, 2.0)):
        attempt.failure(rank, "RuntimeError", TIMED_OUT, unix_s=unix_s)
    attempt.log(2, stack(IN_READ, "Current thread"))
    first, (second, _, *places) = attempt.told()
    assert "lost connections" in first
    assert names(second, "rank 1", "127.0.0.2", f"RuntimeError: {TIMED_OUT}")
    assert names(places[0], "rank 2:", AT_READ)
    assert names(places[1], "ranks 0-1,3:", "RuntimeError", AT_STEP)


@pytest.mark.parametrize("ending", ["launch/slurm: _step_signal: ", ""], ids=["22.05", "24.11"])
def test_a_lost_node(attempt: Attempt, ending: str) -> None:
    attempt.launch(
        "srun: error: Node failure on 127.0.0.3\n"
        "srun: Job step aborted: Waiting up to 5 seconds for job step to finish.\n"
        "srun: got SIGCONT\n"
        "srun: forcing job termination\n"
        "srun: error: 127.0.0.3: tasks 2-3: Terminated\n"
        f"srun: {ending}Terminating StepId=14.0\n"
        "srun: error: 127.0.0.2: tasks 0-1: Terminated\n"
    )
    attempt.failure(0, "RuntimeError", CLOSED)
    first, rest = attempt.told()
    assert rest == []
    assert names(first, "127.0.0.3", "node failure")
    # Only the ranks' log may tell of it.
    attempt.launch("srun: error: 127.0.0.2: task 0: Exited with exit code 1\n")
    cancelled = "error: *** STEP 14.0 ON 127.0.0.2 CANCELLED AT 2026-11-21T09:13:51 DUE TO"
    attempt.log(0, f"slurmstepd-127.0.0.2: {cancelled} NODE FAILURE, SEE SLURMCTLD LOG ***\n")
    assert "node failure" in attempt.told()[0]


@pytest.mark.parametrize(
    ("due", "why"),
    [("", ("cancelled", "preempted")), (" DUE TO TIME LIMIT", ("time limit",))],
)
@pytest.mark.parametrize(
    "begin",
    [
        "srun: got SIGCONT\nsrun: forcing job termination\nsrun: Job step aborted: Waiting ...\n",
        "srun: Job step aborted: Waiting up to 5 seconds for job step to finish.\n",
    ],
)
def test_a_step_ended_from_outside(
    attempt: Attempt, begin: str, due: str, why: tuple[str, ...]
) -> None:
    attempt.launch(
        f"{begin}srun: error: 127.0.0.2: tasks 0-1: Terminated\n"
        "srun: Terminating StepId=11.0\n"
        "srun: error: 127.0.0.3: tasks 2-3: Killed\n"
    )
    attempt.log(
        0,
        "slurmstepd-127.0.0.2: error: *** STEP 11.0 ON 127.0.0.2 CANCELLED AT "
        f"2026-11-21T09:13:29{due} ***\n",
    )
    first, rest = attempt.told()
    assert rest == []
    assert names(first, "outside", *why)


def test_a_rank_that_ended_before_the_others(attempt: Attempt) -> None:
    attempt.launch(
        "srun: First task exited 3s ago\n"
        "srun: StepId=9.0 tasks 1-3: running\n"
        "srun: StepId=9.0 task 0: exited\n"
        "srun: Terminating StepId=9.0\n"
        "srun: Job step aborted: Waiting up to 5 seconds for job step to finish.\n"
        "srun: error: 127.0.0.2: task 1: Killed\n"
        "srun: Terminating StepId=9.0\n"
        "srun: error: 127.0.0.3: tasks 2-3: Killed\n"
    )
    attempt.log(0, "done\n")
    first, (_, *places, logs) = attempt.told()
    assert names(first, "rank 0", "--wait")
    assert [place.partition(": ")[0] for place in places] == ["rank 0", "ranks 1-3"]
    assert "Killed" in places[1] and "A/rank_*.log" in logs


def test_nothing_known(attempt: Attempt) -> None:
    said = "srun: error: Unable to create step for job 7: Invalid generic resource (gres)"
    attempt.launch(said + "\n")
    first, (error, log) = attempt.told()
    assert "do not show" in first
    assert error == said and "A/rank_0.log" in log


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        '{"rank": "1", "exit_code": 2}',
    ],
)
def test_damaged_files_hide_nothing(attempt: Attempt, content: str) -> None:
    """Of a disk that was full; a FIFO is waited for by nobody."""
    attempt.launch("task 0: Exited with exit code 7\n")
    attempt.failure(0, "ValueError", "a cause of its own", exit_code=7)
    (attempt.folder / "failure_1.json").write_text(content)
    (attempt.folder / "rank_x.log").write_text(content)
    os.mkfifo(attempt.folder / "rank_1.log")
    (attempt.folder / "rank_2.log").mkdir()
    first, _ = attempt.told()
    assert names(first, "rank 0", "a cause of its own")


def test_a_full_disk_changes_no_verdict(attempt: Attempt) -> None:
    attempt.launch("task 0: Exited with exit code 2\n")
    with full_disk():
        code = main([str(attempt.folder)])
    assert code == 4
    assert names(attempt.capsys.readouterr().out, "rank 0")


# --- the program ----------------------------------------------------------------------------------


def test_it_reads_what_fail_fast_writes(tmp_path: Path) -> None:
    raising = (
        "from gapo_megatron.errors import ConfigError\n"
        "from gapo_megatron.run.fail_fast import fail_fast\n"
        "with fail_fast():\n"
        "    raise ConfigError('run.seed (x)\\nmust be a number')\n"
    )
    env = {"GAPO_ATTEMPT_DIR": str(tmp_path), "RANK": "1", "PATH": ""}
    failed = subprocess.run([sys.executable, "-c", raising], env=env, cwd=ROOT, capture_output=True)
    assert failed.returncode == 2, failed.stderr
    (tmp_path / "launch.log").write_text("task 1: Exited with exit code 2\ntask 0: Terminated\n")
    command = [sys.executable, "-m", "gapo_megatron.launch.postmortem", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4
    assert (tmp_path / "exit_code").read_text() == "2\n"
    first, *_, last = done.stdout.splitlines()
    assert names(first, "rank 1", "ConfigError: run.seed (x) must be a number")
    assert f"{tmp_path}/rank_1.log" in last
