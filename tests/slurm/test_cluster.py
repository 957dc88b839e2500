"""The private cluster itself: what the other tests of this folder take for granted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import REPOSITORY, Cluster, ClusterError, until

pytestmark = pytest.mark.system

# Starts a cluster with a job whose process leaves its session, says so, and waits to be killed.
_PROGRAM = """
import sys, time
from pathlib import Path
from tests.slurm.cluster import running_cluster, until
folder = Path(sys.argv[1])
with running_cluster(folder, num_nodes=2) as cluster:
    started = folder / "started"
    job = f"srun setsid bash -c 'touch {started}; sleep infinity'"
    cluster.submit("--output=/dev/null", f"--wrap={job}")
    until(started.exists, "a job", seen=cluster.logs)
    print("ready", flush=True)
    time.sleep(3600)
"""


def test_jobs_see_their_nodes_and_gpus(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        "srun bash -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $CUDA_VISIBLE_DEVICES'\n"
    )
    job = cluster.submit(
        "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=8", f"--output={tmp_path}/out", script
    )
    cluster.wait(job, "COMPLETED")
    every_gpu = "0,1,2,3,4,5,6,7"
    assert sorted((tmp_path / "out").read_text().splitlines()) == [
        f"{rank} {rank % 2} {rank // 2} {every_gpu}" for rank in range(4)
    ]


def test_refuses_more_than_a_node_has(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="configuration"):
        cluster.submit("--gpus-per-node=9", "--wrap=true")


def test_sacct_answers_what_submitit_asks(cluster: Cluster) -> None:
    array = cluster.submit("--array=0-1", "--output=/dev/null", "--wrap=exit $SLURM_ARRAY_TASK_ID")
    failed = cluster.submit("--output=/dev/null", "--wrap=exit 3")
    until(lambda: cluster.run("squeue", "--noheader").stdout == "", "no job")
    ask = ["sacct", "-o", "JobID,State,NodeList", "--parsable2", "-j", array, "-j", failed]
    head, *rows = cluster.run(*ask).stdout.splitlines()
    assert head == "JobID|State|NodeList"
    expected = [f"{array}_0|COMPLETED", f"{array}_1|FAILED", f"{failed}|FAILED"]
    assert sorted(row.rpartition("|")[0] for row in rows) == sorted(expected)


@pytest.mark.usefixtures("session_cluster")  # which skips this where there is no Slurm
def test_nothing_outlives_a_killed_parent(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("other")
    parent = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    other = Cluster(folder, num_nodes=2)  # for its name alone: the parent's is the one that runs
    for program in ("munged", "slurmctld", "slurmd", "sleep"):
        assert other.processes(rf"\S*{program}"), program
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(
        lambda: not other.processes(),
        "the end of all processes",
        seen=lambda: str(other.processes()),
    )
