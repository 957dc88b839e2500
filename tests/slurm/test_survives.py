"""What a training survives: the demo on two nodes, hit by everything, against one left alone.

Whatever happens, metrics and weights are those of the undisturbed run, byte for byte. An attempt
costs half a minute of start-up on two cores, so each test hits one run many times.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gapo_megatron.formats import manifest
from tests.slurm.training import (
    CHECKPOINT_EVERY_STEPS,
    NUM_STEPS,
    Training,
    damaged_checkpoints,
    fill,
    small_disk,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]
Start = Callable[..., Training]


def test_saves_and_goes_on_when_asked_to_stop(
    start: Start, require_same: Callable[[Training], None], tmp_path: Path
) -> None:
    """By USR1 during generation, by preemption during a save; at a time limit: the next file."""
    run = start(tmp_path)
    cluster = run.cluster
    run.submit("--partition=low", CHECK_NODES="0")
    with run.paused_in("rollout") as attempt:
        cluster.run("scancel", "--batch", "--signal=USR1", run.job)
        run.until_stop_asked()

    with run.paused_in("checkpoint", not_in=attempt):
        other = cluster.submit(
            "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true"
        )
        run.until_stop_asked()
    cluster.wait(other, "COMPLETED")

    fields = cluster.wait(run.job, "COMPLETED")
    attempts = [f"{run.job}.{count}" for count in range(int(fields["Restarts"]) + 1)]
    steps = [step for attempt in attempts for step in run.steps(attempt)]
    assert steps == list(range(NUM_STEPS)), "a stop repeats no step"
    require_same(run)


@pytest.mark.soak
def test_comes_back_from_faults(
    start: Start, require_same: Callable[[Training], None], tmp_path: Path
) -> None:
    """A node lost, a hang, a full disk, an attempt that lost the run, a scancel."""
    run = start(tmp_path, "run.hang_timeout_s=200")
    cluster, checkpoints = run.cluster, run.run_dir / "checkpoints"
    with small_disk(checkpoints) as disk_is_small:
        run.submit(CHECK_NODES="0", MAX_FAILURES="5")
        attempt = run.until_stage("update", step=CHECKPOINT_EVERY_STEPS)
        cluster.kill_node(cluster.nodes[0])

        attempt = run.until_stage("rollout", not_in=attempt)
        cluster.revive_node(cluster.nodes[0])
        run.kill(1, signal.SIGSTOP)
        run.until_ended(attempt)
        for rank in (0, 1):
            assert "most recent call first" in run.rank_log(rank, attempt), rank
        assert "Timeout (0:03:20)!" in run.rank_log(0, attempt)

        if disk_is_small:
            filler = checkpoints / "filler"
            with run.paused_in("checkpoint", not_in=attempt) as attempt:
                fill(filler, leave=4 * 2**20)
            run.until_ended(attempt)
            assert re.search(r"\brank \d\b.*\bCheckpointError\b", run.log.read_text())
            assert damaged_checkpoints(run.run_dir) == []
            filler.unlink()

        with run.paused_in("checkpoint", not_in=attempt) as attempt:
            before = manifest.list_steps(checkpoints)
            (run.run_dir / "OWNER").write_text("another.0\n")
        assert cluster.wait(run.job, "FAILED")["ExitCode"] == "3:0"
        assert manifest.list_steps(checkpoints) == before

        run.submit(CHECK_NODES="0")
        attempt = run.until_stage("update", not_in=attempt)
        cluster.run("scancel", run.job)
        cluster.wait(run.job, "CANCELLED")

        run.submit(CHECK_NODES="0")
        cluster.wait(run.job, "COMPLETED")
        require_same(run)
    if not disk_is_small:
        pytest.skip("only the full disk was left out, which root alone can set up: mount failed")
