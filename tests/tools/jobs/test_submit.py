"""What tools/submit.py submits, and runs on this machine; the same under Slurm: tests/slurm."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from submitit.core.utils import pickle_load

from gapo_megatron.errors import ConfigError
from gapo_tools import submit as tool
from gapo_tools.jobs.local import gpu_shares
from gapo_tools.jobs.study import Resources
from gapo_tools.jobs.submit import Submission, outside_slurm
from tests.executables import write_program
from tests.submit_setup import ROOT, SUBMIT, environment, steps_of, submit, write_study
from tests.waiting import HANG_S, wait_until

GOLDEN = Path(__file__).parents[2] / "golden"
ONE = Submission(
    name="gapo",
    folder=Path("/shared/runs/gapo/submitit"),
    codes=[Path("/shared/runs/gapo/code/submitted")],
    resources=Resources(nodes=4, time="2-00:00:00", partition="h200", account="physics"),
    parallel=1,
    chain=1,
)
ARRAY = Submission(
    name="clips",
    folder=Path("/shared/my runs/clips/submitit"),
    codes=[Path(f"/shared/my runs/clips/seed_{seed}/code/submitted") for seed in range(3)],
    resources=Resources(tasks_per_node=1, gpus_per_node=0, cpus_per_task=2, exclusive=False),
    parallel=2,
    chain=1,
)


# -- batch scripts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "submission"),
    [
        ("one", ONE),
        ("array", ARRAY),
        ("chain", replace(ONE, chain=2)),
        ("chain_of_arrays", replace(ARRAY, chain=2)),
    ],
)
def test_scripts_are_these(
    name: str, submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole texts. After a change that is meant, write what this prints into tests/golden."""
    monkeypatch.setattr(sys, "executable", "/shared/env/bin/python")
    text = "\n".join(submission.scripts())
    assert text == (GOLDEN / f"submit_{name}.sh").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study.toml", "run.sed=1"], "run.sed"),
        (
            ["study.toml", "parallel.tensor_model_parallel_size=3", "--dry-run"],
            "world size (2)",
        ),
        (["study.toml", "--chain=1000000000"], "--chain (1000000000)"),
        (["study.toml", "--parallel=0"], "--parallel (0)"),
        (["study.toml", "--local", "--nodes=2"], "nodes (2)"),
        (["study.toml", "--local", "--chain=2"], "--chain (2)"),
        (["study.toml", "--local", "--dry-run"], "--wait"),
        (
            ["study.toml", "--local", "--parallel=2", "--gpus-per-node=1"],
            "CUDA_VISIBLE_DEVICES (7)",
        ),
        (
            ["study.toml", "--local", "checkpoint.branch_from=gone/checkpoints/step_5"],
            "checkpoint.branch_from ('gone/checkpoints/step_5')",
        ),
        (["study.toml"], "sbatch"),
        (["--status=runs"], "--status runs"),
        (["study.toml", "--status=runs"], "--status"),
    ],
)
def test_usage_errors_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """In this process: a dozen starts of the program would only import again."""
    write_study(tmp_path, num_runs=2, num_steps=5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    try:
        exit_code = tool.main(arguments)
    except SystemExit as end:  # argparse's
        exit_code = end.code
    said = capsys.readouterr()
    assert (exit_code, said.out) == (2, "")
    assert message in said.err.partition("error: ")[2]  # what is before is how it is used
    assert not (tmp_path / "runs").exists()


def test_a_job_goes_to_the_cluster_that_its_status_is_asked_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, hidden = ["SLURM_CLUSTERS", "SLURM_CONF"], ["SLURM_JOB_ID", "SLURM_PROCID"]
    for name in kept + hidden:
        monkeypatch.setenv(name, "a")
    with outside_slurm({}):
        assert sorted({*kept, *hidden} & {*os.environ}) == kept


def test_a_job_asks_its_own_cluster(tmp_path: Path) -> None:
    """Another way to it, by the accounting, may be closed on the nodes."""
    write_program(tmp_path / "run" / "code" / "a" / "slurm" / "launch.sh", "")
    asked = '[ "$SLURM_CLUSTERS" ] || echo "JobId=7 JobName=a Restarts=9 UserId=a(1) Restarts=0 "'
    path = f"{write_program(tmp_path / 'bin' / 'scontrol', asked).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "slurm"}
    program = "import sys; from gapo_tools.jobs.submit import Launch\n"
    program += "print(Launch(sys.argv[1])()['run_dir'])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run" / "code" / "a")],
        env=environment(tmp_path, PATH=path, SLURM_CLUSTERS="a", **job),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{tmp_path / 'run'}\n", done.stderr


def test_gpus_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of CUDA_VISIBLE_DEVICES; empty means none, unset all."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_shares(2, number=2) == [[0, 1], [2, 3]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f3a")
    assert gpu_shares(0, number=2) == [[], []]
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES \(GPU-1f3a\)"):
        gpu_shares(1, number=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"gpus_per_node \(1\)"):
        gpu_shares(1, number=1)


# -- on this machine -------------------------------------------------------------------------------


def processes_of(folder: Path) -> list[str]:
    """Command lines of what still runs for the test in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"PYTHON={folder}/python\0" in (path / "environ").read_text(errors="replace"):
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def states(folder: Path) -> dict[str, str]:
    """State of each run, from the table of --status."""
    done = submit(folder, "--status=runs")
    assert done.returncode == 0, done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    return {row[1].strip(): row[3].strip() for row in rows}


def result_of_the_job(folder: Path) -> tuple[str, str]:
    """Outcome of the only job that has a result, and the state of its run."""
    (result,) = (folder / "runs" / "submitit").glob("*_result.pkl")
    outcome, status = pickle_load(result)
    return outcome, status["state"]


class Terminal:
    """Takes what is shown, since nobody can write to a terminal that is full."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._swallow, daemon=True)
        self._thread.start()

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def hang_up(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _swallow(self) -> None:
        # A terminal stays open while somebody waits to read from it, even if it is closed.
        with suppress(OSError):  # its other side is closed
            while not self._is_over.is_set():
                if select.select([self._master], [], [], 0.1)[0]:
                    os.read(self._master, 4096)
        os.close(self._master)


@contextmanager
def in_a_terminal(folder: Path, *arguments: str, **changes: str):
    """tools/submit.py as the foreground of a terminal; yields the process and its keyboard."""
    master, slave = pty.openpty()

    def become_foreground() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*SUBMIT, *arguments],
        cwd=folder,
        env=environment(folder, TERM="xterm", **changes),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=become_foreground,
    )
    os.close(slave)
    terminal = Terminal(master)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        terminal.hang_up()


def test_a_study_runs_here_and_survives_a_rank(tmp_path: Path) -> None:
    """Two at a time of three, each on GPUs of its own; rank 1 of the second dies once."""
    write_study(tmp_path, num_runs=3, num_steps=8)
    arguments = ["study.toml", "--local", "--parallel=2", "--gpus-per-node=2"]
    outside = {"SLURM_PROCID": "0", "CUDA_VISIBLE_DEVICES": "1,3,5,7"}
    done = submit(tmp_path, *arguments, EVENTS="1:exit 7", **outside)
    assert done.returncode == 0, done.stdout + done.stderr
    changes = [line for line in done.stdout.splitlines() if re.fullmatch(r"seed_\d: \w+", line)]
    assert changes[:3] == ["seed_0: running", "seed_1: running", "seed_2: queued"]
    assert sorted(changes[3:]) == [
        *("seed_0: finished", "seed_1: finished", "seed_2: finished", "seed_2: running")
    ]
    devices = []
    for seed, num_attempts in ((0, 1), (1, 2), (2, 1)):
        run_dir = tmp_path / "runs" / f"seed_{seed}"
        assert steps_of(run_dir) == list(range(8))
        assert len(list(run_dir.glob("attempts/*.*"))) == num_attempts
        (code,) = (run_dir / "code").iterdir()
        for rank in range(2):
            log = (run_dir / "attempts" / "latest" / f"rank_{rank}.log").read_text()
            env = json.loads(log.splitlines()[0])
            assert env["config"] == f"{code}/config.toml"
            assert env["PYTHONPATH"].split(":")[0] == str(code)
            assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "2")
            assert "SLURM_PROCID" not in env
        devices.append(env["CUDA_VISIBLE_DEVICES"])
    assert sorted(devices[:2]) == ["1,3", "5,7"]
    assert devices[2] in devices[:2]
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes")
    # Again, with one more seed: what is done stays as it is, and the last table has all.
    write_study(tmp_path, num_runs=4, num_steps=8)
    done = submit(tmp_path, *arguments, **outside)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 4 runs" in done.stdout
    assert [len(list((tmp_path / f"runs/seed_{i}/code").iterdir())) for i in range(4)] == [1] * 4
    assert all(f"seed_{i}" in done.stdout.rpartition("already")[2] for i in range(4))


@pytest.mark.system
def test_ctrl_c_saves_and_ends_and_the_same_command_goes_on(tmp_path: Path) -> None:
    write_study(tmp_path, num_runs=2, num_steps=40)
    run_dir = tmp_path / "runs" / "seed_0"
    hold = tmp_path / "hold"
    hold.touch()
    with in_a_terminal(tmp_path, "study.toml", "--local", HOLD=str(hold)) as (process, terminal):
        wait_until((run_dir / "checkpoints" / "step_00000003").exists, "steps")
        terminal.type(b"\x03")
        assert process.wait(timeout=HANG_S) == 1
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes")
    assert states(tmp_path) == {"seed_0": "stopped", "seed_1": "queued"}
    # The job ended as one that was asked to, not by the terminal's signal.
    assert result_of_the_job(tmp_path) == ("success", "stopped")
    assert 3 <= len(steps_of(run_dir)) <= 10
    assert submit(tmp_path, "study.toml", "--local", "--parallel=2").returncode == 0
    assert states(tmp_path) == {"seed_0": "finished", "seed_1": "finished"}
    assert steps_of(run_dir) == list(range(40))
    # Once more: there is nothing to do, and nothing is done.
    assert submit(tmp_path, "study.toml", "--local", "--parallel=2").returncode == 0
    assert len(list(run_dir.glob("attempts/*.*"))) == 2


@pytest.mark.parametrize("how", ["hang-up", pytest.param("SIGTERM", marks=pytest.mark.system)])
def test_so_do(tmp_path: Path, how: str) -> None:
    write_study(tmp_path, num_runs=2, num_steps=100_000)  # an hour and more
    with in_a_terminal(tmp_path, "study.toml", "--local") as (process, terminal):
        wait_until((tmp_path / "runs/seed_0/checkpoints/step_00000003").exists, "steps")
        if how == "hang-up":
            terminal.hang_up()
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HANG_S) == 1
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes")
    assert states(tmp_path) == {"seed_0": "stopped", "seed_1": "queued"}
    # The job ended as one that was asked to, not by the terminal's signal.
    assert result_of_the_job(tmp_path) == ("success", "stopped")


def test_no_rank_outlives_its_job(tmp_path: Path) -> None:
    """Killed is submitit's process, which started launch.sh: the ranks end with it."""
    write_study(tmp_path, num_runs=1, num_steps=100_000)  # an hour and more
    with in_a_terminal(tmp_path, "study.toml", "--local") as (process, _):
        wait_until((tmp_path / "runs/seed_0/checkpoints/step_00000003").exists, "steps")
        (pickle,) = (tmp_path / "runs" / "submitit").glob("*_submitted.pkl")
        controller = pickle.name.partition("_")[0]
        (task,) = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
        os.kill(int(task), signal.SIGKILL)
        assert process.wait(timeout=HANG_S) == 1
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes")


def test_what_a_job_begins_and_ends_with_loads_in_a_blink(tmp_path: Path) -> None:
    """A job's first process unpickles `submit`; --status and --help need no pydantic.

    Neither submitting nor the check that each attempt of every job begins with needs torch, which
    takes seconds to import.
    """
    study = write_study(tmp_path, num_runs=2, num_steps=2)
    program = (
        "import sys, gapo_tools.submit; from pathlib import Path\n"
        "from gapo_tools.jobs import submit, local\n"
        "from gapo_megatron.launch import preflight, postmortem\n"
        "heavy = {'torch', 'transformers', 'megatron', 'vllm'}\n"
        "print(sorted((heavy | {'numpy', 'pydantic'}) & set(sys.modules)))\n"
        "from gapo_megatron.launch.prepare import check_before_nodes\n"
        "from gapo_tools.jobs.study import read_study, unfinished\n"
        "for run in unfinished(read_study(Path(sys.argv[1]), [])):\n"
        "    check_before_nodes(run.config, world_size=2)\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program, str(study)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n[]\n", done.stderr
