"""What a run survives whose last nodes only generate: two nodes that train, two that generate.

Strictly on-policy it ends, whatever happens, with the metrics and weights of an undisturbed run on
two nodes that do both. A run that generates ahead repeats itself after a kill; at a stop it gives
back what is sampled ahead, and counts it.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, running_cluster
from tests.slurm.conftest import Start
from tests.slurm.training import (
    CHECKPOINT_EVERY_STEPS,
    NUM_STEPS,
    Training,
    damaged_checkpoints,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]

SIDES = ("rollout.generation_nodes=2",)
AHEAD = (*SIDES, "rollout.max_staleness=1", "objective.importance_weight_max=2")
JOB = {"CHECK_NODES": "0", "MAX_FAILURES": "6"}
NODES = "--nodes=4"
FIRST_THAT_GENERATES = 2
"""Rank, and place of its node among the job's."""


@pytest.fixture(scope="module")
def session_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes for each side, and a spare one."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    folder = tmp_path_factory.mktemp("slurm5")
    with running_cluster(folder, num_nodes=5, first_job=36 + 70 * worker) as running:
        yield running


def lines_of(run: Training) -> list[dict[str, Any]]:
    """Of each step, without those of evaluations."""
    lines = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss/policy" in line]


def require_went_on(run: Training, attempt: str) -> None:
    """An attempt lost its first rank that generates; it ended by its own will, at a checkpoint."""
    folder = run.attempt_dir(attempt)
    assert (folder / "outcome").read_text() == "stopped\n"
    said = f"rank {FIRST_THAT_GENERATES} of the job, rank 0 of generation, is gone"
    assert said in run.rank_log(0, attempt)
    assert "1 generation ranks are lost" in run.rank_log(0, attempt)


def test_without_a_rank_that_generates_the_job_goes_on_to_its_next_checkpoint(
    start: Start, require_same: Callable[[Training], None], tmp_path: Path
) -> None:
    run = start(tmp_path, *SIDES)
    run.submit(NODES, **JOB)
    attempt = run.until_stage("wait", step=CHECKPOINT_EVERY_STEPS)
    run.kill(FIRST_THAT_GENERATES, signal.SIGKILL)
    run.until_ended(attempt)
    require_went_on(run, attempt)
    lost = run.attempt_dir(attempt) / "lost.log"
    assert lost.read_text() == f"task {FIRST_THAT_GENERATES}: Killed\n"
    run.cluster.wait(run.job, "COMPLETED")
    require_same(run)


def test_without_a_node_that_generates_a_job_of_no_kill_goes_on(
    start: Start, require_same: Callable[[Training], None], tmp_path: Path
) -> None:
    run = start(tmp_path, *SIDES)
    run.submit(NODES, "--no-kill", **JOB)
    attempt = run.until_stage("wait", step=CHECKPOINT_EVERY_STEPS)
    run.cluster.kill_node(run.cluster.nodes[FIRST_THAT_GENERATES])
    run.until_ended(attempt)
    require_went_on(run, attempt)
    run.cluster.wait(run.job, "COMPLETED")
    require_same(run)


@pytest.mark.soak
def test_on_policy_nothing_is_seen_of_any_fault(
    start: Start, require_same: Callable[[Training], None], tmp_path: Path
) -> None:
    """A rank that generates is killed, a node that generates is lost, the job is preempted."""
    run = start(tmp_path, *SIDES)
    cluster = run.cluster
    run.submit(NODES, "--partition=low", **JOB)
    attempt = run.until_stage("wait", step=1)
    run.kill(FIRST_THAT_GENERATES, signal.SIGKILL)
    run.until_ended(attempt)
    require_went_on(run, attempt)

    attempt = run.until_stage("wait", not_in=attempt, step=CHECKPOINT_EVERY_STEPS)
    cluster.kill_node(cluster.nodes[FIRST_THAT_GENERATES + 1])

    with run.paused_in("update", not_in=attempt, step=CHECKPOINT_EVERY_STEPS + 1):
        other = cluster.submit(
            "--partition=high", NODES, "--exclusive", "--output=/dev/null", "--wrap=true"
        )
        run.until_stop_asked()
    cluster.wait(other, "COMPLETED")

    cluster.wait(run.job, "COMPLETED")
    require_same(run)


def test_a_run_that_generates_ahead_loses_no_sample_in_silence(
    start: Start, tmp_path: Path
) -> None:
    """Killed within a step it repeats it; at its time limit it gives back what it is ahead."""
    run = start(tmp_path, *AHEAD)
    cluster = run.cluster
    run.submit(NODES, **JOB)
    attempt = run.until_stage("update", step=CHECKPOINT_EVERY_STEPS + 1)
    before = lines_of(run)
    run.kill(0, signal.SIGKILL)
    run.until_ended(attempt)
    assert re.search(r"\brank 0\b.*\bKilled\b", run.log.read_text()), "who has lost it is no cause"

    stopped = CHECKPOINT_EVERY_STEPS + 2
    with run.paused_in("update", not_in=attempt, step=stopped) as attempt:
        stopped = run.step()
        # Slurm looks at time limits every half minute; the script asks for USR1 at 300 s.
        cluster.run("scontrol", "update", f"JobId={run.job}", "EndTime=now+120seconds")
        run.until_stop_asked()
    run.until_ended(attempt)
    cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=60")
    # After the update that it was stopped in, which need not be the step's first.
    assert [*(run.run_dir / "checkpoints").glob(f"step_{stopped:08d}_*")]

    cluster.wait(run.job, "COMPLETED")
    lines = lines_of(run)
    assert [line["step"] for line in lines] == list(range(NUM_STEPS))
    assert lines[: len(before)] == before, "what was sampled ahead is in the checkpoint"
    assert len(before) > CHECKPOINT_EVERY_STEPS, "the kill has made it repeat a step"
    given_back = {line["step"] for line in lines if line.get("rollout/given_back_tokens")}
    assert given_back == {stopped}
    # After a stop in the midst of a step its weights come first: they sample two batches.
    fresh = {line["step"] for line in lines if not line["rollout/version_gap"]}
    assert fresh == {0, stopped + 1}
    assert {line["rollout/version_gap"] for line in lines} == {0, 1}
    assert damaged_checkpoints(run.run_dir) == []
    last = run.run_dir / "checkpoints" / f"step_{NUM_STEPS:08d}" / "trainer_state.json"
    drawn = json.loads(last.read_text())["source"]
    num_problems = len((run.checkout / "runs/demo/task/train.jsonl").read_text().splitlines())
    assert drawn["epoch"] == 0
    assert len(drawn["remaining"]) == num_problems - NUM_STEPS * 16, "each problem once"
