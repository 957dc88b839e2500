"""Partial rollouts with ranks that only generate, over gloo: versions of tokens, and a resume."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapo_megatron.config import Config
from gapo_megatron.exchange import Posted
from gapo_megatron.learn.plan import plan_step
from gapo_megatron.objective import make_batch
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.run.generation_ranks import GenerationRanks
from gapo_megatron.run.process_group import World
from gapo_megatron.types import Episode
from tests.attempt_setup import make_attempt
from tests.batches import readable
from tests.dist import run_sides
from tests.run.test_two_sides import EOS, NUM_STEPS, PROBLEMS, make_config, order, probe, serve

NUMBERS = {problem.id: number for number, problem in enumerate(PROBLEMS)}


def say(problem: str, sample: int, *, version: int) -> list[int]:
    """Responses of 4 to 228 tokens; each token says which version of the weights sampled it."""
    length = 3 + 8 * ((7 * int(problem.removeprefix("p")) + 3 * sample) % 29)
    return [*[100 + version] * length, EOS]


@dataclass
class Saved:
    """What a checkpoint has after a batch."""

    step: int
    source_state: Any
    open_groups: list[tuple[Episode, ...]]


def go_on(world: World, folder: Path, max_staleness: int, saved: Saved | None) -> Any:
    """A run to its end, from the beginning or after a batch; each trainer's account of it."""
    assert world.bridge is not None
    config = make_config(
        folder,
        max_staleness=max_staleness,
        batch={"oversampling": 2.0, "partial_rollouts": True},
        rollout={"max_response_tokens": 250},
    )
    attempt = make_attempt(folder / os.environ["RANK"], may_lead=not world.bridge.is_generation)
    attempt.on_alive = world.bridge.beat
    if world.bridge.is_generation:
        return serve(world, config, attempt, lambda engine: None, say=say)
    first, start = 0, dict[str, Any]()
    if saved is not None:
        opened = to_rollouts(
            saved.open_groups, problems=[NUMBERS[one[0].prompt.id] for one in saved.open_groups]
        )
        first = saved.step + 1
        start = {
            "source_state": saved.source_state,
            "next_step": first,
            "open_groups": opened.spread(rank=world.rank, size=world.world_size),
        }
    generation = order(world, config, attempt, **start)
    # The batch of a checkpoint that is ahead is learned from after the weights have been sent.
    ahead = min(max_staleness, 1) if saved else 0
    generation.sync(probe(), policy_version=first - ahead)
    generation.sample_ahead()
    if ahead:
        generation.sync(probe(), policy_version=first)
        generation.sample_ahead()
    found = []
    for step in range(first, NUM_STEPS):
        found.append(account_of(generation, world, config, step))
        generation.sync(probe(), policy_version=step + 1)
        generation.sample_ahead()
    generation.close()
    return found


def account_of(generation: GenerationRanks, world: World, config: Config, step: int) -> Any:
    """Facts of the step's batch, this rank's tokens, the open groups before and after it."""
    rollouts = generation.collect(step)
    assert rollouts is not None
    kept = [one for one in gc.get_objects() if isinstance(one, Posted)]
    assert not kept, "the open groups of a resume have arrived"
    batch = make_batch(rollouts, config.objective.resolve())
    plan = plan_step(
        batch,
        config.batch,
        needs_every_sequence=config.objective.needs_every_sequence,
        data_parallel_size=world.world_size,
    )
    batch = generation.bring_tokens(replace(batch, plan=plan))
    for row in batch.rows_here:
        *tokens, _ = batch.response_ids[row].tolist()
        *versions, _ = batch.versions(row).tolist()
        assert tokens == [100 + version for version in versions]
        assert len(batch.rollout_log_probs[row]) == len(tokens) + 1
    assert not batch.has_scored
    before = generation.gather_open_groups(before_batch=True)
    after = generation.gather_open_groups()
    facts = (rollouts.table.tobytes(), rollouts.metrics, readable(batch))
    return facts, generation.source_state, shown(before), list(after), batch.table.copy()


def shown(groups: Any) -> list[list[Any]]:
    """Open groups, to be compared."""
    return [
        [
            (
                *(one.prompt, one.sample, one.finished, one.token_ids.tolist()),
                *(one.log_probs.tolist(), one.carried_log_probs),
                None if one.carried_versions is None else one.carried_versions.tolist(),
            )
            for one in group
        ]
        for group in groups
    ]


@pytest.mark.parametrize(("max_staleness", "newest"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2])])
def test_weights_arrive_within_a_response_and_a_resumed_run_repeats_the_rest(
    tmp_path: Path, max_staleness: int, newest: list[int]
) -> None:
    """Every problem is learned from once, however long its responses are."""
    first, second, *_ = run_sides(go_on, 2, 2, tmp_path / "whole", max_staleness, None)
    learned: list[int] = []
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        (table, metrics, _), source_state, before, after, rows = ours
        assert (table, metrics, source_state) == (*theirs[0][:2], theirs[1])
        assert theirs[3] == [] and before == (shown(first[step - 1][3]) if step else [])
        learned += rows["problem"][rows["sample"] == 0].tolist()
        still = [NUMBERS[group[0].prompt.id] for group in after]
        # Four problems are drawn in every step but the first, which fills the engines.
        assert len(learned) == 4 * (step + 1) and len(still) == 4
        assert len({*learned, *still}) == len(learned) + len(still)
        assert {*rows["newest_version"].tolist()} == {newest[step]}
        assert rows["oldest_version"].min() == step - metrics["rollout/oldest_version_gap"]
        for group in after:
            for one in group:
                tokens = one.token_ids.tolist()
                assert one.carried_log_probs is None
                versions = [] if one.carried_versions is None else one.carried_versions.tolist()
                assert len(versions) == len(tokens)
                ours = [100 + version for version in versions]
                assert tokens == ours[: len(tokens) - one.finished] + [EOS] * one.finished
    ages = [row["newest_version"] - row["oldest_version"] for _, _, _, _, t in first for row in t]
    assert max(ages) >= 2 and min(ages) == 0, "weights arrived twice within a response"

    for step in (1, 2):
        _, source_state, _, after, _ = first[step]
        saved = Saved(step, source_state, after)
        resumed = run_sides(go_on, 2, 2, tmp_path / str(step), max_staleness, saved)
        for rest, whole in zip(resumed[:2], (first, second), strict=True):
            assert len(rest) == NUM_STEPS - step - 1
            for ours, theirs in zip(rest, whole[step + 1 :], strict=True):
                assert ours[:3] == theirs[:3] and shown(ours[3]) == shown(theirs[3])


def test_a_checkpoint_has_no_token_twice_nor_on_a_wrong_rank() -> None:
    """Rows are kept in turn: what `spread` leaves here is what the rank is sent."""
    prompt, ids = PROBLEMS[0], np.arange(3, dtype=np.int32)
    group = [Episode(prompt, i, ids, -ids.astype(np.float32)) for i in range(5)]
    parts = [to_rollouts([group]).spread(rank=rank, size=2) for rank in range(2)]
    assert [part.rows_here for part in parts] == [[0, 2, 4], [1, 3]]
    assert all(part.table["holder"].tolist() == [0, 1, 0, 1, 0] for part in parts)
