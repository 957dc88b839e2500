"""The batch scripts on a cluster: what they ask for, where tasks run, when a job starts again.

The trainer is a stand-in (`stand_in.py`); everything else is what a user starts. What a real
training survives: test_survives.py. The first stage has three, for all of this folder: a job runs
to its end, one that is requeued goes on, one that is cancelled ends.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.launch.freeze import freeze
from tests.executables import write_program
from tests.slurm.cluster import REPOSITORY, Cluster, until

SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.sbatch"))


class Launch:
    """Jobs of slurm/gapo_demo.sbatch with the stand-in trainer, on one run folder."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run_dir = folder / "run"
        self.code = folder / "code"
        freeze(REPOSITORY, self.code, config=f'[run]\noutput_dir = "{self.run_dir}"\n')
        (self.code / "slurm" / "site.sh").unlink(missing_ok=True)  # of the site where tests run
        config = (REPOSITORY / "configs" / "demo.toml").read_text()
        (self.code / "config.toml").write_text(config.replace('"runs/demo"', f'"{self.run_dir}"'))
        shutil.copy(Path(__file__).with_name("stand_in.py"), self.code / "gapo_megatron/train.py")
        warm_start = self.code / "runs" / "demo" / "warm_start" / "config.json"
        warm_start.parent.mkdir(parents=True)
        warm_start.touch()  # nobody reads it here; without it the script would make it

    def submit(self, stand_in: str, *options: str, **env: str) -> str:
        """Two nodes of one task each, unless `options` say otherwise; returns the job's id."""
        env = {"CHECK_NODES": "0", "PYTHON": sys.executable} | env
        env |= {"GAPO_CODE": str(self.code), "STAND_IN": stand_in}
        return self.cluster.submit(
            "--nodes=2",
            "--ntasks-per-node=1",
            "--export=ALL," + ",".join(f"{key}={value}" for key, value in env.items()),
            f"--output={self.folder}/%j.out",
            *options,
            "slurm/gapo_demo.sbatch",
            cwd=self.code,
        )

    def log(self, job: str) -> str:
        return (self.folder / f"{job}.out").read_text()

    def until_at_work(self, attempt: str) -> None:
        """Until rank 1 of an attempt has said something."""
        log = self.run_dir / "attempts" / attempt / "rank_1.log"
        until(lambda: log.exists() and log.read_text() != "", f"a rank of {attempt} at work")

    def attempts(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "attempts").glob("*.*"))

    def ranks(self, attempt: str) -> list[dict[str, Any]]:
        """What each rank of an attempt saw, from the logs, in the order of ranks."""
        folder = self.run_dir / "attempts" / attempt
        paths = [folder / f"rank_{rank}.log" for rank in range(len(list(folder.glob("rank_*"))))]
        return [json.loads(path.read_text()) for path in paths]


@pytest.fixture
def launch(cluster: Cluster, tmp_path: Path) -> Launch:
    return Launch(cluster, tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_slurm_accepts_the_script(path: Path, cluster: Cluster) -> None:
    (num_nodes,) = re.findall(r"^#SBATCH --nodes=(\d+)$", path.read_text(), re.MULTILINE)
    fitting = min(int(num_nodes), len(cluster.nodes))
    answer = cluster.run("sbatch", "--test-only", f"--nodes={fitting}", path).stderr
    assert re.search(r"Job \d+ to start at", answer), answer


def test_every_task_knows_its_place(launch: Launch) -> None:
    """Also: one log per rank, the frozen code and no other.

    Ranks are placed node by node, whatever a site's habit: the last nodes are those that generate.
    """
    env = {"SLURM_DISTRIBUTION": "cyclic", "GENERATION_NODES": "1"}
    job = launch.submit("finish", "--ntasks-per-node=2", "--cpus-per-task=3", **env)
    launch.cluster.wait(job, "COMPLETED")
    ranks = launch.ranks(f"{job}.0")
    first, second = launch.cluster.nodes[:2]
    assert [
        [rank[key] for key in ("SLURM_PROCID", "SLURM_LOCALID", "SLURMD_NODENAME")]
        for rank in ranks
    ] == [["0", "0", first], ["1", "1", first], ["2", "0", second], ["3", "1", second]]
    for rank in ranks:
        assert rank["SLURM_NTASKS"] == "4"
        assert rank["SLURM_CPUS_PER_TASK"] == "3"
        assert rank["MASTER_ADDR"] == first
        assert rank["MASTER_PORT"] == ranks[0]["MASTER_PORT"]
        assert rank["GAPO_ATTEMPT"] == f"{job}.0"
        assert rank["GAPO_ATTEMPT_DIR"] == str(launch.run_dir / "attempts" / f"{job}.0")
        assert float(rank["GAPO_JOB_END"]) > 1e9
        assert rank["argv"] == [str(launch.code / "config.toml")]
        assert rank["file"] == str(launch.code / "gapo_megatron" / "train.py")
    assert (launch.run_dir / "attempts" / "latest").readlink() == Path(f"{job}.0")
    assert (launch.run_dir / "OWNER").read_text() == f"{job}.0\n"


@pytest.mark.system
@pytest.mark.parametrize("export", ["NONE", "ALL"])
def test_ranks_have_what_the_launcher_and_the_site_set_whatever_sbatch_passes_on(
    launch: Launch, export: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, where a site's default is NONE; or what an interactive step has left behind.

    No log and no file of the run shows a secret. The shape of a node is set as the example does.
    """
    secret = "hunter2"
    secrets = launch.folder / "secrets"
    secrets.write_text(f"WANDB_API_KEY={secret}\n")
    secrets.chmod(0o600)
    example = (REPOSITORY / "slurm" / "site.example.sh").read_text()
    (shape,) = re.findall(r"^# (sbatch\(\) .*)$", example, re.MULTILINE)
    site = [
        *("set -a", "CHECK_NODES=0", f"PYTHON={sys.executable}", "STAND_IN=finish"),
        *(f"GAPO_CODE={launch.code}", "GLOO_SOCKET_IFNAME=lo", "NODE_ADDRESS=%s-ib"),
        *(f"SECRETS={secrets}", "set +a", shape),
    ]
    (launch.code / "slurm" / "site.sh").write_text("\n".join(site) + "\n")
    left_behind = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_STEP_ID": "7"}
    left_behind |= {"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "3"}
    left_behind |= {"SLURM_RESTART_COUNT": "2"}
    kept = {"SLURM_MEM_PER_CPU": "10", "SLURM_STEPMGR": ""}  # srun finds a manager of steps by it
    for name, value in (left_behind | kept).items():
        monkeypatch.setitem(launch.cluster.env, name, value)
    options = f"--nodes=2 --output={launch.folder}/%j.out --export={export}"
    submit = f". slurm/site.sh && sbatch --parsable {options} slurm/gapo_demo.sbatch"
    job = launch.cluster.run("bash", "-c", submit, cwd=launch.code).stdout.strip()
    launch.cluster.wait(job, "COMPLETED")
    ranks = launch.ranks(f"{job}.0")
    assert len(ranks) == 8
    for rank in ranks:
        assert rank["GAPO_ATTEMPT"] == f"{job}.0"
        assert rank["MASTER_ADDR"] == f"{launch.cluster.nodes[0]}-ib"
        assert rank["SLURM_STEP_ID"] == "0"
        assert {"PYTHONPATH", "GLOO_SOCKET_IFNAME", "WANDB_API_KEY"} <= set(rank["names"])
        assert "SLURM_CPU_BIND" not in rank and "SLURM_STEPMGR" in rank
    for path in launch.folder.rglob("*"):
        if path.is_file() and path != secrets:
            assert secret.encode() not in path.read_bytes(), path


def test_one_job_per_run_and_none_after_scancel(launch: Launch) -> None:
    job = launch.submit("wait")
    launch.until_at_work(f"{job}.0")

    second = launch.submit("finish", "--nodes=1")
    assert launch.cluster.wait(second, "FAILED")["ExitCode"] == "2:0"
    assert f"job {job}" in launch.log(second)
    assert (launch.run_dir / "OWNER").read_text() == f"{job}.0\n"

    launch.cluster.run("scancel", job)
    launch.cluster.wait(job, "CANCELLED")
    # A requeue would come from the batch script, which is gone with its last process.
    until(lambda: not launch.cluster.processes(SLURM_JOB_ID=job), "the job's end")
    fields = launch.cluster.job(job)
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0")
    assert launch.attempts() == [f"{job}.0"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("end", "exit_code", "of_srun", "of_launcher"),
    [
        ("exit 1 7", 7, "Exited with exit code 7", "exit code 7"),
        ("kill 1", 137, "Killed", "Killed"),
    ],
)
def test_failures_are_bounded_and_named(
    launch: Launch, end: str, exit_code: int, of_srun: str, of_launcher: str
) -> None:
    job = launch.submit(end, MAX_FAILURES="2")
    fields = launch.cluster.wait(job, "FAILED")
    assert (fields["ExitCode"], fields["Restarts"]) == (f"{exit_code}:0", "1")
    assert launch.attempts() == [f"{job}.0", f"{job}.1"]
    for attempt in launch.attempts():
        errors = (launch.run_dir / "attempts" / attempt / "launch.log").read_text()
        assert f"task 1: {of_srun}" in errors
    second = launch.cluster.nodes[1]
    told = re.compile(rf"\brank 1\b.*\b{re.escape(second)}\b.*\b{of_launcher}\b")
    assert len(told.findall(launch.log(job))) == 2
    assert "MAX_FAILURES" in launch.log(job)


@pytest.mark.system
def test_says_what_to_do_where_slurm_does_not_requeue(launch: Launch) -> None:
    job = launch.submit("stop", "--no-requeue")
    assert launch.cluster.wait(job, "FAILED")["ExitCode"] == "75:0"
    assert "same command" in launch.log(job)


@pytest.mark.system
def test_every_start_in_an_allocation_by_hand_is_its_own(launch: Launch) -> None:
    """salloc counts no restarts: what the first start left must not speak for the second.

    In an interactive step the environment is that of a batch script.
    """
    command = "export SLURM_PROCID=0; bash slurm/gapo_demo.sbatch; echo code=$?"
    again = f"{command}; STAND_IN='finish' bash slurm/gapo_demo.sbatch; echo code=$?"
    env = {"CHECK_NODES": "0", "PYTHON": sys.executable, "STAND_IN": "stop"}
    env |= {"GAPO_CODE": str(launch.code), "ON_STOP": "requeue"}
    settings = [f"{key}={value}" for key, value in env.items()]
    output = launch.cluster.run(
        *("env", *settings, "salloc", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", again),
        cwd=launch.code,
    ).stdout
    assert re.findall(r"code=(\d+)", output) == ["75", "0"], output
    assert len(launch.attempts()) == 2


def test_a_restart_reads_nothing_of_the_checkout(cluster: Cluster, tmp_path: Path) -> None:
    """What the job froze at its first start counts, even where the checkout is broken by then."""
    launch = Launch(cluster, tmp_path)
    frozen = launch.code.rename(tmp_path / "frozen")
    checkout = launch.code
    shutil.copytree(frozen, checkout, symlinks=True)
    (checkout / "configs" / "demo.toml").write_text((frozen / "config.toml").read_text())
    job = cluster.submit(
        *("--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/%j.out"),
        f"--export=ALL,CHECK_NODES=0,PYTHON={sys.executable},STAND_IN=wait",
        *("slurm/gapo_demo.sbatch", f"run.output_dir={launch.run_dir}"),
        cwd=checkout,
    )
    launch.until_at_work(f"{job}.0")
    (checkout / "configs" / "demo.toml").write_text("broken")
    shutil.rmtree(checkout / "gapo_megatron")
    cluster.run("scontrol", "requeue", job)
    launch.until_at_work(f"{job}.1")
    cluster.run("scancel", job)
    cluster.wait(job, "CANCELLED")


@pytest.mark.system
def test_a_bad_node_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """With a spare node its place is taken; without one the job moves. Both at once: 50 s each.

    On the bad node there is no interpreter: a disk that is not mounted. So it says nothing.
    """
    bad = cluster.nodes[1]
    good = [node for node in cluster.nodes if node != bad]
    script = f'[ "$SLURMD_NODENAME" != {bad} ] || exit 127\nexec {sys.executable} "$@"'
    python = write_program(tmp_path / "python", script)
    checked = {"CHECK_NODES": "1", "PYTHON": str(python)}
    spare, moving = Launch(cluster, tmp_path / "spare"), Launch(cluster, tmp_path / "moving")
    with_spare = spare.submit("finish", "--nodes=3", NUM_NODES="2", **checked)
    without = moving.submit("finish", **checked)

    assert cluster.wait(with_spare, "COMPLETED")["Restarts"] == "0"
    assert [rank["SLURMD_NODENAME"] for rank in spare.ranks(f"{with_spare}.0")] == good
    assert re.search(rf"\bbad\b.*\b{re.escape(bad)}\b", spare.log(with_spare))

    fields = cluster.wait(without, "COMPLETED")
    assert (fields["Restarts"], fields["ExcNodeList"]) == ("1", bad)
    assert [rank["SLURMD_NODENAME"] for rank in moving.ranks(f"{without}.1")] == good
    assert not (moving.run_dir / "attempts" / f"{without}.0" / "rank_1.log").exists()


def test_the_jobs_output_is_kept_in_the_run_folder(launch: Launch) -> None:
    """Of every start, and all of it: also what Slurm says of the job's end."""
    before = set(launch.code.iterdir())
    job = launch.submit("wait", f"--output={launch.code}/%x-%j.out")
    launch.until_at_work(f"{job}.0")
    assert not set(launch.code.glob("*.out")) - before
    launch.cluster.run("scontrol", "requeue", job)
    launch.until_at_work(f"{job}.1")
    launch.cluster.run("scancel", job)
    launch.cluster.wait(job, "CANCELLED")
    assert not set(launch.code.glob("*.out")) - before
    for attempt, says in ((f"{job}.0", "REQUEUE"), (f"{job}.1", "CANCELLED")):
        text = (launch.run_dir / "attempts" / attempt / "job.out").read_text()
        assert attempt in text and says in text, text


def test_a_script_is_found_from_any_folder(launch: Launch, tmp_path: Path) -> None:
    """`sbatch /path/slurm/gapo_demo.sbatch` from elsewhere; what it asks for is read from there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {"GAPO_CODE": str(launch.code), "PYTHON": sys.executable, "DRY_RUN": "1"}
    job = launch.cluster.submit(
        "--nodes=1",
        "--ntasks-per-node=1",
        "--export=ALL," + ",".join(f"{key}={value}" for key, value in env.items()),
        f"--output={launch.folder}/%j.out",
        REPOSITORY / "slurm" / "gapo_demo.sbatch",
        cwd=elsewhere,
    )
    until(lambda: launch.cluster.job(job)["JobState"] in ("FAILED", "COMPLETED"), "the job's end")
    log = launch.log(job)
    assert "awk" not in log and "No such file" not in log
    assert launch.cluster.job(job)["ExitCode"].partition(":")[0] != "127", log
