"""tools/submit.py on a cluster: arrays, chains, what a result is and when there is none.

The runs train nothing (tests/submit_setup.py); everything else is real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit.core.utils import pickle_load

from tests.slurm.cluster import Cluster, tail, until
from tests.submit_setup import SUBMIT, environment, steps_of, write_study
from tests.waiting import HANG_S

pytestmark = pytest.mark.system

Submit = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Submit:
    """Starts tools/submit.py in the test's folder."""

    def start(*arguments: str, **changes: str) -> subprocess.Popen[str]:
        slurm = {name: cluster.env[name] for name in ("SLURM_CONF", "PATH")}
        return subprocess.Popen(
            [*SUBMIT, *arguments],
            cwd=tmp_path,
            env=environment(tmp_path, **slurm, **changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While it exists, a run started with HOLD does not finish."""
    path = tmp_path / "hold"
    path.touch()
    return path


def done(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == exit_code, output
    return output


def rows(table: str) -> dict[str, list[str]]:
    """Cells by run: job, state, attempts, step, reward, pass@1, elapsed, why."""
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in table.splitlines()]
    return {row[0]: row[1:] for row in cells if row}


def jobs_of(run_dir: Path) -> list[str]:
    return (run_dir / "jobs").read_text().split()


def result_of(job: str, folder: Path) -> tuple[str, object] | None:
    path = folder / "submitit" / f"{job}_0_result.pkl"
    return pickle_load(path) if path.exists() else None


def coming_result(job: str, folder: Path) -> tuple[str, object]:
    """The job writes it after its run's last file."""
    until(lambda: result_of(job, folder) is not None, f"the result of {job}")
    found = result_of(job, folder)
    assert found is not None
    return found


def until_step(run_dir: Path, step: int) -> None:
    checkpoint = run_dir / "checkpoints" / f"step_{step:08d}"
    until(checkpoint.exists, f"step {step} of {run_dir.name}", seen=lambda: traces(run_dir))


def traces(run_dir: Path) -> str:
    """What a run has left so far: its files, and the ends of its logs."""
    files = sorted(path for path in run_dir.parent.rglob("*") if path.is_file())
    logs = [path for path in files if path.suffix in {".log", ".out", ".err"}]
    return "\n".join([*map(str, files), *(f"== {log}\n{tail(log)}" for log in logs)])


def until_second_attempt(run_dir: Path) -> None:
    attempts = run_dir / "attempts"
    until(lambda: any(attempts.glob("*.1")), f"second attempt of {run_dir.name}")


def a_rank_of(run_dir: Path) -> int:
    """Process id of its training rank 1."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            env = (path / "environ").read_text().split("\0")
        except OSError:
            continue
        ours = any(word.startswith(str(run_dir)) for word in words)
        if ours and "trainer.py" in " ".join(words) and "SLURM_PROCID=1" in env:
            return int(path.name)
    raise AssertionError(f"no rank 1 of {run_dir}")


def test_an_array_survives_what_befalls_its_runs(
    cluster: Cluster, submit: Submit, hold: Path, tmp_path: Path
) -> None:
    """One is left alone, one loses a rank, one its time, and in the last a rank gives up.

    The last task of an array has the array's own job id: what is asked for it must not be done to
    all.
    """
    study = write_study(tmp_path, num_runs=4, num_steps=40)
    folder = tmp_path / "runs"
    runs = [folder / f"seed_{seed}" for seed in range(4)]
    process = submit(str(study), "--wait", EVENTS="3:exit 7", HOLD=str(hold))
    for run_dir in runs:
        until_step(run_dir, 3)
    os.kill(a_rank_of(runs[1]), signal.SIGKILL)
    array = jobs_of(runs[0])[0].partition("_")[0]
    cluster.run("scontrol", "update", f"JobId={array}_2", "EndTime=now+305seconds")
    for run_dir in runs[1:]:
        until_second_attempt(run_dir)
    # A requeued job keeps the six minutes it was given: its signal would come again.
    cluster.run("scontrol", "update", f"JobId={array}_2", "TimeLimit=60")
    hold.unlink()
    table = rows(done(process))

    assert [jobs_of(run_dir) for run_dir in runs] == [[f"{array}_{task}"] for task in range(4)]
    for task, (run_dir, num_attempts) in enumerate(zip(runs, (1, 2, 2, 2), strict=True)):
        assert steps_of(run_dir) == list(range(40))
        assert cluster.job(f"{array}_{task}")["Restarts"] == str(num_attempts - 1)
        assert table[run_dir.name] == [
            *(f"{array}_{task}", "finished", str(num_attempts), "40/40", "0.390", "0.500"),
            *("0:01:20", ""),
        ]
        outcome, status = coming_result(f"{array}_{task}", folder)
        assert (outcome, status["state"], status["attempts"]) == (
            "success",
            "finished",
            num_attempts,
        )
    for run_dir in runs:  # each trains from its own frozen code, though one script serves all
        (code,) = (run_dir / "code").iterdir()
        log = (run_dir / "attempts" / "latest" / "rank_0.log").read_text()
        env = json.loads(log.splitlines()[0])
        assert env["PYTHONPATH"].split(":")[0] == str(run_dir / "code" / code.name)
        assert env["config"] == f"{run_dir}/code/{code.name}/config.toml"


def test_a_requeue_leaves_no_result_and_a_cancelled_job_an_error(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    study = write_study(tmp_path, num_runs=1, num_steps=10000)
    folder, run_dir = tmp_path / "runs", tmp_path / "runs" / "seed_0"
    done(submit(str(study)))
    (job,) = jobs_of(run_dir)
    until_step(run_dir, 3)
    cluster.run("scontrol", "requeuehold", job)  # or it might start before the status is read
    cluster.wait(job, "PENDING")
    assert result_of(job, folder) is None
    assert rows(done(submit("--status", "runs")))["seed_0"][:3] == [job, "pending", "1"]
    cluster.run("scontrol", "release", job)

    cluster.wait(job, "RUNNING")
    until((run_dir / "attempts" / f"{job}.1" / "rank_0.log").exists, "its second start")
    until_step(run_dir, len(steps_of(run_dir)) + 3)
    cluster.run("scancel", job)
    cluster.wait(job, "CANCELLED")
    outcome, trace = coming_result(job, folder)
    assert outcome == "error"
    assert "exit code 143" in trace
    assert rows(done(submit("--status", "runs/seed_0")))["seed_0"][:3] == [job, "cancelled", "2"]
    assert steps_of(run_dir) == list(range(len(steps_of(run_dir))))


def test_a_chain_goes_on_where_a_link_stopped(
    cluster: Cluster, submit: Submit, hold: Path, tmp_path: Path
) -> None:
    study = write_study(tmp_path, num_runs=1, num_steps=100)
    folder, run_dir = tmp_path / "runs", tmp_path / "runs" / "seed_0"
    process = submit(str(study), "--chain=3", "--wait", HOLD=str(hold))
    until_step(run_dir, 3)
    first, second, third = jobs_of(run_dir)
    cluster.run("scancel", "--batch", "--signal=USR1", first)
    cluster.wait(first, "COMPLETED")
    hold.unlink()
    table = rows(done(process))
    assert table["seed_0"][:4] == [second, "finished", "2", "100/100"]
    cluster.wait(third, "COMPLETED")
    assert steps_of(run_dir) == list(range(100))
    links = [coming_result(job, folder) for job in (first, second, third)]
    assert [(link[0], link[1]["state"]) for link in links] == [
        ("success", "stopped"),
        ("success", "finished"),
        ("success", "finished"),
    ]
    assert [path.name for path in sorted(run_dir.glob("attempts/*.*"))] == [
        f"{first}.0",
        f"{second}.0",
    ]


def test_a_cancelled_link_ends_its_chain_alone(
    cluster: Cluster, submit: Submit, hold: Path, tmp_path: Path
) -> None:
    """Of an array: the other run's chain goes on."""
    study = write_study(tmp_path, num_runs=2, num_steps=40)
    runs = [tmp_path / "runs" / f"seed_{seed}" for seed in range(2)]
    process = submit(str(study), "--chain=2", "--wait", EVENTS="0:deaf", HOLD=str(hold))
    until_step(runs[0], 3)
    cluster.run("scancel", jobs_of(runs[0])[0])
    cluster.wait(jobs_of(runs[0])[0], "CANCELLED")
    hold.unlink()
    table = rows(done(process, exit_code=1))
    assert table["seed_0"][1] == "cancelled"
    assert table["seed_1"][1] == "finished"
    for run_dir, state in zip(runs, ("CANCELLED", "COMPLETED"), strict=True):
        for job in jobs_of(run_dir):
            cluster.wait(job, state)


def test_an_array_that_slurm_refuses_does_not_hide_those_before(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    more = "[[runs]]\nrun.seed = 7\nresources.partition = 'nowhere'\n"
    study = write_study(tmp_path, num_runs=1, num_steps=2, tasks=1, more=more)
    output = done(submit(str(study)), exit_code=1)
    assert re.search(r"\barray 2 of 2\b", output)
    assert "seed_7-nowhere" in output
    assert re.search("invalid partition", output)
    (job,) = jobs_of(tmp_path / "runs" / "seed_0")
    cluster.wait(job, "COMPLETED")
    assert not (tmp_path / "runs" / "seed_7-nowhere").exists()


def test_what_is_under_way_is_not_submitted_again(
    cluster: Cluster, submit: Submit, hold: Path, tmp_path: Path
) -> None:
    study = write_study(tmp_path, num_runs=1, num_steps=20, tasks=1)
    done(submit(str(study), HOLD=str(hold)))
    until_step(tmp_path / "runs" / "seed_0", 3)
    write_study(tmp_path, num_runs=2, num_steps=20, tasks=1)
    output = done(submit(str(study)))
    assert re.search(r"\b1 of 2 runs\b.*\brunning\b", output)
    jobs = [jobs_of(tmp_path / "runs" / f"seed_{seed}") for seed in range(2)]
    assert [len(one) for one in jobs] == [1, 1]
    hold.unlink()
    for (job,) in jobs:
        cluster.wait(job, "COMPLETED")
    output = done(submit(str(study)))
    assert re.search(r"\b2 of 2\b.*\bfinished\b", output)
    assert [len(list((tmp_path / f"runs/seed_{i}/code").iterdir())) for i in range(2)] == [1, 1]


def test_what_is_asked_for_outranks_the_environment(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    """sbatch lets SBATCH_* outrank a script; here a site's setting is a default."""
    study = write_study(tmp_path, num_runs=1, num_steps=2)
    site = {"SBATCH_PARTITION": "low", "SBATCH_TIMELIMIT": "7"}
    for options, expected in (
        ([], ("low", "00:07:00")),
        (["--partition=main", "--time=11", "run.num_steps=4"], ("main", "00:11:00")),
    ):
        done(submit(str(study), *options, **site))
        job = jobs_of(tmp_path / "runs" / "seed_0")[-1]
        fields = cluster.job(job)
        assert (fields["Partition"], fields["TimeLimit"]) == expected
        cluster.wait(job, "COMPLETED")  # while it is under way it is not submitted again
