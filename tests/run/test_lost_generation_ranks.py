"""Generation ranks are killed at every moment of a step, and the others go on: same samples."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.config import Config
from gapo_megatron.learn.plan import plan_step, rounding_share
from gapo_megatron.objective import make_batch
from gapo_megatron.run import process_group
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.process_group import World
from tests.attempt_setup import make_attempt
from tests.dist import rank_context
from tests.dying import MOMENTS, Death, always, arm, dying
from tests.run.test_open_groups import say
from tests.run.test_two_sides import NUM_STEPS, make_config, order, probe, response, serve
from tests.scripted_engine import ScriptedEngine
from tests.waiting import HANG_S


def before_step_of(deaths: Sequence[Death], *, rank: int) -> Callable[[Any], object]:
    """What a scripted engine calls before it decodes."""
    mine = [one for one in deaths if one.rank == rank and one.moment == "decodes"]
    return dying(always, mine[0]) if mine else always


@dataclass(frozen=True)
class Job:
    """A run in which ranks die."""

    num_training: int = 1
    num_generation: int = 2
    deaths: tuple[Death, ...] = ()
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `rollout` and `batch`."""
    says: Callable[..., list[int]] = response
    makes: Callable[..., ScriptedEngine] = ScriptedEngine

    @property
    def num_ranks(self) -> int:
        return self.num_training + self.num_generation

    @property
    def dead(self) -> set[int]:
        return {death.rank for death in self.deaths}


def run_rank(rank: int, job: Job, port: int, folder: Path) -> None:
    """A rank of a job."""
    output = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, sys.__stderr__.fileno())  # type: ignore[union-attr]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    rollout = {"generation_ranks": job.num_generation, **job.sections.get("rollout", {})}
    batch = job.sections.get("batch", {})
    config = make_config(folder, max_staleness=0, rollout=rollout, batch=batch)
    with fail_fast():
        world = process_group.start(HANG_S, rollout=config.rollout)
        arm(job.deaths, rank=rank)
        seen = act(world, config, job, before_step_of(job.deaths, rank=rank))
        (folder / f"result{rank}").write_bytes(pickle.dumps(seen))


def act(world: World, config: Config, job: Job, before_step: Callable[[Any], object]) -> Any:
    """All steps of a run; returns what a trainer has seen of each."""
    assert world.bridge is not None
    is_generation = world.bridge.is_generation
    run_dir = Path(config.run.output_dir) / os.environ["RANK"]
    attempt = make_attempt(run_dir, may_lead=not is_generation, hang_timeout_s=HANG_S)
    attempt.on_alive = world.bridge.beat
    if is_generation:
        return serve(world, config, attempt, before_step, job.makes, job.says)
    generation = order(world, config, attempt)
    generation.sync(probe(), policy_version=0)
    seen = []
    for step in range(NUM_STEPS):
        rollouts = generation.collect(step)
        assert rollouts is not None
        lost = generation.stopwatch.notes["generation/lost_ranks"]
        batch = make_batch(rollouts, config.objective.resolve())
        plan = plan_step(
            batch,
            config.batch,
            needs_every_sequence=config.objective.needs_every_sequence,
            data_parallel_size=world.world_size,
            measured_share=rounding_share(config.model.precision),
        )
        batch = generation.bring_tokens(replace(batch, plan=plan))
        mine = np.flatnonzero(batch.table["holder"] == world.rank).tolist()
        responses = {row: batch.response_ids[row].tolist() for row in mine}
        # Who has sampled a response is no part of it.
        table = rollouts.changed(holder=np.zeros(len(rollouts), np.int32)).table.tobytes()
        facts = (table, rollouts.samples, rollouts.metrics, generation.source_state)
        seen.append((facts, responses, lost))
        generation.sync(probe(), policy_version=step + 1)
        generation.sample_ahead()
    generation.close()
    return seen


def run(job: Job, folder: Path, *, codes: Mapping[int, int] | None = None) -> list[Any]:
    """What the trainers have seen, if they end well, as do all ranks that are not named.

    Args:
        job: the run.
        folder: for its files.
        codes: exit codes of ranks that neither die by their own hand nor end well.
    """
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks: list[BaseProcess] = [
        rank_context().Process(target=run_rank, args=(rank, job, port, folder))
        for rank in range(job.num_ranks)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(HANG_S)
        ends = dict.fromkeys(range(len(ranks)), 0) | dict.fromkeys(job.dead, -signal.SIGKILL)
        found = {rank: process.exitcode for rank, process in enumerate(ranks)}
        assert found == ends | dict(codes or {}), logs(folder)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    results = [folder / f"result{rank}" for rank in range(job.num_training)]
    return [pickle.loads(path.read_bytes()) for path in results if path.exists()]


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in folder.glob("*.log"))


def without_losses(seen: Any) -> Any:
    """What was learned from; not how many ranks were lost by then."""
    return [step[:-1] for step in seen]


ELSEWHERE = ("builds its engine", "calls", "begins again", "trains")
"""Moments that other tests have."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (seen,) = run(Job(), tmp_path_factory.mktemp("runs") / "undisturbed")
    assert [lost for *_, lost in seen] == [0.0] * NUM_STEPS
    return without_losses(seen)


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.system)])
@pytest.mark.parametrize("moment", [one for one in MOMENTS if one not in ELSEWHERE])
def test_the_samples_are_the_same(tmp_path: Path, undisturbed: Any, moment: str, rank: int) -> None:
    count = {"ends": 0, "decodes": 9}.get(moment, 2)
    (seen,) = run(Job(deaths=(Death(rank, moment, count),)), tmp_path / "run")
    assert without_losses(seen) == undisturbed
    if moment != "ends":
        assert [lost for *_, lost in seen][-1] == 1.0
    log = (tmp_path / "run" / "0.log").read_text()
    assert f"rank {rank} of the job, rank {rank - 1} of generation, is gone" in log


@pytest.mark.parametrize(
    "deaths",
    [
        # Neighbours at once, as on a node; one after another; one while the others begin again.
        (Death(3, "decodes", 5), Death(4, "decodes", 5)),
        (Death(2, "receives weights", 1), Death(4, "judges", 2)),
        (Death(4, "verifies", 1), Death(2, "begins again", 0)),
    ],
    ids=["neighbours", "in turn", "again"],
)
def test_two_of_three_may_die(tmp_path: Path, deaths: tuple[Death, ...]) -> None:
    """Two trainers agree on what is lost."""
    undisturbed = run(Job(2, 3), tmp_path / "undisturbed")
    disturbed = run(Job(2, 3, deaths), tmp_path / "disturbed")
    assert len(disturbed) == 2
    assert [*map(without_losses, disturbed)] == [*map(without_losses, undisturbed)]
    assert [seen[-1][-1] for seen in disturbed] == [2.0, 2.0]


def test_a_loss_among_engines_of_two_ranks_ends_the_job(tmp_path: Path) -> None:
    """One of an engine may be waiting for the other within vLLM."""
    engines = {"rollout": {"tensor_parallel_size": 2}}
    job = Job(1, 4, (Death(2, "decodes", 9),), engines)
    assert run(job, tmp_path / "run", codes=dict.fromkeys((0, 1, 3, 4), 1)) == []
    for rank in (1, 3, 4):
        last = (tmp_path / "run" / f"{rank}.log").read_text().splitlines()[-1]
        named = f"error (rank {rank}): rank 2 of the job, rank 1 of generation, is gone"
        assert last.startswith(named)


@pytest.mark.parametrize("moment", ["decodes", "idle", "receives weights"])
def test_what_is_sampled_ahead_is_sampled_again(tmp_path: Path, moment: str) -> None:
    """By the same weights, unless the next ones were on their way."""
    ahead = {"rollout": {"max_staleness": 1}}
    (undisturbed,) = run(Job(sections=ahead), tmp_path / "undisturbed")
    job = Job(deaths=(Death(2, moment, 9 if moment == "decodes" else 2),), sections=ahead)
    (seen,) = run(job, tmp_path / "disturbed")
    if moment == "decodes":
        assert without_losses(seen) == without_losses(undisturbed)
    # The same problems, in any case.
    assert [facts[-1] for facts, *_ in seen] == [facts[-1] for facts, *_ in undisturbed]
    assert seen[-1][-1] == 1.0


def test_unfinished_responses_go_on_where_the_last_batch_left_them(tmp_path: Path) -> None:
    partial = {
        "rollout": {"max_response_tokens": 250},
        "batch": {"oversampling": 2.0, "partial_rollouts": True},
    }
    job = Job(deaths=(Death(1, "decodes", 60),), sections=partial, says=say)
    (seen,) = run(job, tmp_path / "run")
    assert len(seen) == NUM_STEPS and seen[-1][-1] == 1.0


@pytest.mark.parametrize(
    ("deaths", "named"),
    [
        (
            (Death(1, "decodes", 5), Death(2, "judges", 1)),
            "rank 2 of the job, rank 1 of generation",
        ),
        ((Death(0, "trains", 1),), "rank 0 of the job, rank 0 of training"),
    ],
    ids=["all that generate", "one that trains"],
)
def test_other_losses_end_the_job(tmp_path: Path, deaths: tuple[Death, ...], named: str) -> None:
    """Started by hand: under a launcher that ends the others."""
    job = Job(deaths=deaths)
    left = {*range(job.num_ranks)} - job.dead
    assert run(job, tmp_path / "run", codes=dict.fromkeys(left, 1)) == []
    for rank in left:
        last = (tmp_path / "run" / f"{rank}.log").read_text().splitlines()[-1]
        assert last.startswith(f"error (rank {rank}): {named}, is gone")


def build_together(*arguments: Any, **settings: Any) -> ScriptedEngine:
    """As vLLM, whose every engine makes a group of all ranks."""
    dist.new_group(backend="gloo")
    return ScriptedEngine(*arguments, **settings)


def test_while_engines_are_built_no_rank_waits_for_one_that_is_gone(tmp_path: Path) -> None:
    """The group would wait for its time-out."""
    job = Job(1, 3, (Death(3, "builds its engine", 0),), makes=build_together)
    assert run(job, tmp_path / "run", codes=dict.fromkeys(range(3), 1)) == []
    for rank in (1, 2):
        last = (tmp_path / "run" / f"{rank}.log").read_text().splitlines()[-1]
        assert last.startswith(f"error (rank {rank}): rank 3 of the job, rank 2 of generation, is")
