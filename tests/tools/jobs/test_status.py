"""How runs stand, as their folders tell; with a Slurm: tests/slurm/test_submitit.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.io.run_folder import find_runs
from gapo_tools.jobs.status import (
    JOBS_NAME,
    Status,
    ask_slurm,
    read_status,
    read_statuses,
    status_table,
)
from tests.executables import write_program
from tests.messages import mentions


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_run(run_dir: Path, *, num_steps: int = 9, steps: int = 0, outcome: str = "") -> None:
    """A run with frozen code, one attempt, `steps` steps and an evaluation before each."""
    write(run_dir / "code" / "17" / "config.toml", f"[run]\nnum_steps = {num_steps}\n")
    write(run_dir / "attempts" / "17.0" / "launch.log", "")
    if outcome:
        write(run_dir / "attempts" / "17.0" / "outcome", f"{outcome}\n")
    lines = []
    for step in range(steps):
        lines.append({"step": step, "eval/pass@1": 0.25 + step / 100})
        lines.append({"step": step, "reward/mean": step / 10})
    write(run_dir / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "attempts" / "latest").symlink_to("17.0")
    timings = [{"step": step, "time/step_s": 1.5, "time/update_s": 1} for step in range(steps)]
    if steps:
        timings.insert(0, {"step": 0, "startup/model_s": 2, "startup/vllm_s": 3.5})
    write(run_dir / "timings.jsonl", "".join(json.dumps(line) + "\n" for line in timings))


def test_numbers(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=9, steps=4, outcome="stopped")
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "reward/mean": 0.')  # being written
    write(tmp_path / "OWNER", "17.0\n")
    assert read_status(tmp_path) == Status(
        run_dir=str(tmp_path),
        state="stopped",
        job="17",
        attempts=1,
        steps=4,
        num_steps=9,
        reward=0.3,
        pass_at_1=0.28,
        elapsed_s=11.5,
        why="",
    )


def test_a_run_is_as_its_newest_submission_says(tmp_path: Path) -> None:
    """Also where it was trained without the launcher, or never started."""
    write(tmp_path / "code" / "17" / "config.toml", "[run]\nnum_steps = 4\n")
    status = read_status(tmp_path)
    assert (status.state, status.job, status.attempts, status.steps) == ("queued", "", 0, 0)
    assert (status.reward, status.pass_at_1, status.elapsed_s) == (None, None, 0)
    write(tmp_path / "finished.json", '{"num_steps": 4}')
    assert read_status(tmp_path).state == "finished"
    launched = tmp_path / "launched"
    make_run(launched, num_steps=4, steps=4, outcome="finished")
    assert read_status(launched).state == "finished"
    for run_dir, state in ((tmp_path, "queued"), (launched, "stopped")):
        write(run_dir / "code" / "18" / "config.toml", "[run]\nnum_steps = 8\n")
        status = read_status(run_dir)
        assert (status.state, status.num_steps) == (state, 8)


def test_an_outcome_that_no_run_has_is_a_failure(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1, outcome="stoppe")
    status = read_status(tmp_path)
    assert (status.state, status.is_active) == ("failed", False)


def test_the_newest_attempt_counts_and_its_failure_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, steps=2, outcome="stopped")
    attempt = tmp_path / "attempts" / "17.1"
    failure = {"rank": 3, "host": "n1", "unix_s": 1.0, "exit_code": 1, "error": "DivergenceError"}
    failure |= {"message": "loss is nan", "traceback": ""}
    write(attempt / "failure_3.json", json.dumps(failure))
    (tmp_path / "attempts" / "latest").unlink()
    (tmp_path / "attempts" / "latest").symlink_to("17.1")
    status = read_status(tmp_path)
    assert (status.state, status.attempts) == ("failed", 2)
    assert "rank 3" in status.why
    assert "DivergenceError: loss is nan" in status.why


def test_finds_runs_of_a_folder(tmp_path: Path) -> None:
    """Submitted ones, and those that were not."""
    study = tmp_path / "study"
    make_run(study / "b")
    write(study / "a" / "config.toml", "[run]\nnum_steps = 7\n")
    write(study / "submitit" / "log", "")
    assert find_runs(study) == [study / name for name in "ab"]
    assert find_runs(study / "b") == [study / "b"]
    assert find_runs(tmp_path) == find_runs(tmp_path / "nowhere") == []
    write(study / "a" / "metrics.jsonl", json.dumps({"step": 2, "reward/mean": 0.5}) + "\n")
    status = read_status(study / "a")
    assert (status.state, status.steps, status.num_steps) == ("started", 3, 7)


def test_without_slurm_here_its_jobs_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared disk may be seen from a machine that is not of the cluster."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_slurm(["17", "18_0"]) == {"17": "unknown", "18_0": "unknown"}
    make_run(tmp_path / "running", steps=1)
    make_run(tmp_path / "done", num_steps=1, steps=1, outcome="finished")
    make_run(tmp_path / "local", outcome="stopped")
    for name in ("running", "done"):
        write(tmp_path / name / JOBS_NAME, "17\n")
    found = read_statuses([tmp_path / name for name in ("running", "done", "local")])
    assert [(one.state, one.is_active, one.why) for one in found] == [
        ("unknown", True, ""),
        ("finished", False, ""),
        ("stopped", False, ""),
    ]


HELD = ["REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "STOPPED", "RESIZING", "REQUEUED"]
WAITING = ["PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "SUSPENDED", "COMPLETING", "STAGE_OUT"]
ENDED = ["COMPLETED", "FAILED", "CANCELLED by 7", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"]
ENDED += ["OUT_OF_MEMORY", "PREEMPTED", "REVOKED"]


@pytest.mark.parametrize("state", [*HELD, *WAITING, *ENDED])
def test_a_run_whose_job_may_go_on_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    write_program(tmp_path / "bin" / "squeue", f"echo '17|{state}'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    make_run(tmp_path / "run")
    write(tmp_path / "run" / JOBS_NAME, "17\n")
    (status,) = read_statuses([tmp_path / "run"])
    assert status.is_active == (state not in ENDED)


@pytest.mark.parametrize(
    ("squeue", "jobs", "expected"),
    [
        ("17|COMPLETED\n18|RUNNING\n19|PENDING", "17\n18\n19\n", ("18", "running", "")),
        ("17|CONFIGURING\n18|PENDING", "17\n18\n", ("17", "configuring", "")),
        ("17|PENDING\n18|PENDING", "17\n18\n", ("17", "pending", "")),
        ("17|COMPLETED\n18|FAILED", "17\n18\n", ("18", "failed", "why")),
        ("17|CANCELLED", "17\n", ("17", "cancelled", "")),
        # Held, or stopped by SIGSTOP: it has not ended, and is not the run that was asked to stop.
        ("17|REQUEUE_HOLD\n18|COMPLETED", "17\n18\n", ("17", "requeue_hold", "")),
        ("17|STOPPED\n18|PENDING", "17\n18\n", ("17", "suspended", "")),
        ("17|TIMEOUT", "17\n", ("17", "timeout", "why")),
        ("17|COMPLETED", "17\n", ("17", "failed", "why")),
        ("5_1|RUNNING\n5_0|PENDING", "5_0\n", ("5_0", "pending", "")),
        ("", "17\n", ("17", "failed", "why")),
        ("3|RUNNING", "", ("3", "running", "")),  # by sbatch: only its OWNER tells the job
    ],
)
def test_what_slurm_says_comes_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    squeue: str,
    jobs: str,
    expected: tuple[str, str, str],
) -> None:
    """The choice among answers; that squeue answers so is shown on a cluster."""
    said = f"{'echo' if squeue else 'true'} '{squeue}'"
    program = write_program(tmp_path / "bin" / "squeue", said)
    monkeypatch.setenv("PATH", f"{program.parent}:/bin")
    make_run(tmp_path / "run", steps=1)
    write(tmp_path / "run" / "OWNER", "3.0\n")
    write(tmp_path / "run" / JOBS_NAME, jobs)
    (status,) = read_statuses([tmp_path / "run"])
    assert (status.job, status.state, "why" if status.why else "") == expected


def test_neither_a_users_filters_nor_the_name_of_the_cluster_hide_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'echo "CLUSTER: a"\n[ "$SQUEUE_PARTITION" ] || echo "17|RUNNING"'
    said += '\n[ "$SLURM_CLUSTERS" != a,b ] || echo "CLUSTER: b\n17|COMPLETED"'
    write_program(tmp_path / "squeue", said)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    for clusters in ("a", "a,b"):
        monkeypatch.setenv("SLURM_CLUSTERS", clusters)
        assert ask_slurm(["17"]) == {"17": "running"}
    write(tmp_path / "run" / "OWNER", "17-20260101T000000-5.0\n")
    (tmp_path / "run" / "attempts" / "latest").mkdir(parents=True)
    assert read_statuses([tmp_path / "run"])[0].state == "running"


def test_a_job_that_slurm_forgot_before_it_started_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "slurm_load_jobs error: Invalid job id specified"
    write_program(tmp_path / "squeue", f"echo '{said}' >&2\nexit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    write(tmp_path / "run" / "code" / "a" / "config.toml", "[run]\nnum_steps = 3\n")
    write(tmp_path / "run" / JOBS_NAME, "17\n")
    assert read_statuses([tmp_path / "run"])[0].state == "gone"


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "4", "reward/mean": "x"}',
        '{"step": [4], "reward/mean": null, "startup/x": "y"}',
        '{"step": true, "reward/mean": NaN, "time/step_s": NaN}',
        "\x00",
    ],
)
def test_a_damaged_line_counts_nothing(tmp_path: Path, line: str) -> None:
    make_run(tmp_path, steps=4, outcome="stopped")
    expected = read_status(tmp_path)
    for name in ("metrics.jsonl", "timings.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write(line + "\n")
    assert read_status(tmp_path) == expected
    status_table([expected], title="")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1, outcome="stopped")
    config = tmp_path / "code" / "17" / "config.toml"
    for text in ("[run", "run = 3\n", "[run]\nnum_steps = 'x'\n"):
        config.write_text(text)
        with pytest.raises(ConfigError, match=mentions(config)):
            read_status(tmp_path)
    config.unlink()
    config.symlink_to("config.toml")  # to itself: as if there were none
    assert read_status(tmp_path).num_steps == 0
    for name in ("metrics.jsonl", "timings.jsonl", "OWNER", "jobs"):
        path = tmp_path / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        with pytest.raises(ConfigError, match=mentions(path)):
            read_statuses([tmp_path])
        path.unlink()


@pytest.mark.parametrize("job", ["17\x00", "--help", "17;18"])
def test_a_damaged_id_of_a_job_is_named(tmp_path: Path, job: str) -> None:
    make_run(tmp_path)
    write(tmp_path / JOBS_NAME, f"16\n{job}\n")
    with pytest.raises(ConfigError, match=mentions(tmp_path / JOBS_NAME, repr(job)[1:200])):
        read_statuses([tmp_path])


@pytest.mark.parametrize("owner", ["local-x-../../etc.0", "local-x-1\x00.0", "local-x-this.0"])
def test_an_owner_that_is_no_launcher_is_not_alive(tmp_path: Path, owner: str) -> None:
    make_run(tmp_path)
    write(tmp_path / "OWNER", owner.replace("this", str(os.getpid())))
    assert read_status(tmp_path).state == "failed"
