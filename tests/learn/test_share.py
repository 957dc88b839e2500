"""Which tokens a rank gets: plan, rounding and weight check need no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.checkpoint import OpenStep
from gapo_megatron.config import VERIFIED_SEQUENCES, Config
from gapo_megatron.exchange import GroupChannel
from gapo_megatron.facts import Spread
from gapo_megatron.learn.plan import (
    plan_rounding,
    plan_updates,
    wanted_sequences,
)
from gapo_megatron.learn.share import Places, bring_tokens
from gapo_megatron.objective import make_batch
from gapo_megatron.rollout.describe import describe
from gapo_megatron.rollout.sync import first_sequences
from gapo_megatron.types import Batch
from tests.dist import run_distributed
from tests.learn_setup import GROUP_SIZE, make_config, make_groups, mask_some

# Groups without advantage come first and last; of the ten, few teach.
VERDICTS = ("wwww", "cccc", "cwww", "cwcw", *["wwww"] * 15, "cccw")


def config_of(**batch: Any) -> Config:
    sizes = {"rollout_prompts": len(VERDICTS), "minibatch_prompts": len(VERDICTS) // 2}
    return make_config(Path("unused"), batch=sizes | batch)


def facts_alone() -> tuple[Batch, list[Any]]:
    facts, tokens = describe(mask_some(make_groups(VERDICTS)))
    return make_batch(facts, config_of().objective.resolve()), tokens


def needed(batch: Batch, config: Config, *, dp_size: int, dp_rank: int) -> set[int]:
    updates = plan_updates(batch, config, data_parallel_size=dp_size)
    measured = plan_rounding(batch, config, data_parallel_size=dp_size)
    shares = [one.microbatches[dp_rank] for one in updates.minibatches] + [measured[dp_rank]]
    return {i for microbatches in shares for indices in microbatches for i in indices}


@pytest.mark.parametrize("dp_size", [1, 2, 5])
def test_a_rank_wants_what_it_computes_and_no_more(dp_size: int) -> None:
    batch, _ = facts_alone()
    config = config_of()
    wanted = wanted_sequences(batch, config, data_parallel_size=dp_size)
    first = {*range(VERIFIED_SEQUENCES)}
    for dp_rank, numbers in enumerate(wanted):
        assert numbers == sorted(set(numbers))
        assert {*numbers} == needed(batch, config, dp_size=dp_size, dp_rank=dp_rank) | first
    everything = {*range(len(VERDICTS) * GROUP_SIZE)}
    assert set().union(*wanted) < everything  # what has no advantage stays where it is
    every = wanted_sequences(batch, config, data_parallel_size=dp_size, every=True)
    assert set().union(*every) == everything
    # Nobody gets what another needs, and the rest is shared out once.
    added = [{*one} - {*two} for one, two in zip(every, wanted, strict=True)]
    assert sum(map(len, added)) == len(everything - set().union(*wanted))


def spread(batch: Batch, tokens: list[Any]) -> Spread:
    """Every sequence is held by one rank, which are unequal."""
    holders = np.minimum(np.arange(len(tokens)) // 30, dist.get_world_size() - 1)
    held = {int(i): tokens[i] for i in np.flatnonzero(holders == dist.get_rank())}
    return Spread(batch.facts.changed(holder=holders), held)


def bring(folder: Path) -> list[list[int]]:
    """Data-parallel ranks 0 and 1; ranks 1 and 2 are one of them."""
    batch, tokens = facts_alone()
    config, rank, channel = config_of(), dist.get_rank(), GroupChannel(dist.group.WORLD)
    places = Places((0, 1, 1), (0, 2))
    sampled = spread(batch, tokens)
    batch = make_batch(sampled.facts, config.objective.resolve())
    batch = bring_tokens(batch, sampled.held, config, places=places, channel=channel)
    here = []
    for i in range(len(tokens)):
        try:
            found = batch.tokens(i)
        except KeyError:
            continue
        here.append(i)
        assert found.response_ids.tolist() == tokens[i].response_ids.tolist()
        assert found.rollout_log_probs.tolist() == tokens[i].rollout_log_probs.tolist()
    dp_rank = places.dp_ranks[rank]
    wanted = wanted_sequences(batch, config, data_parallel_size=2)[dp_rank]
    assert {*here} == {*wanted} | {*sampled.held}
    first_sequences(batch, VERIFIED_SEQUENCES)  # every rank has them
    save_and_load(batch, tokens, folder)
    return here


def save_and_load(batch: Batch, tokens: list[Any], folder: Path) -> None:
    """A checkpoint has everything, also what no rank computes; ranks share in keeping it."""
    channel, rank = GroupChannel(dist.group.WORLD), dist.get_rank()
    opened = OpenStep(batch, {"reward/mean": 0.5}, {}).gathered(channel)
    opened.save(folder)
    dist.barrier()
    if rank == 1:  # a step without an update needs nothing of one rank
        (folder / "progress_00001.pt").unlink()
    found = OpenStep.load(folder, torch.device("cpu"), num_updates=0)
    assert [found.batch.tokens(i).response_ids.tolist() for i in range(len(tokens))] == [
        one.response_ids.tolist() for one in tokens
    ]
    assert found.batch.facts.problem.tolist() == batch.facts.problem.tolist()
    assert found.batch.facts.holder.tolist() == [i % 3 for i in range(len(tokens))]
    assert found.batch.facts.log_prob_sum.tolist() == batch.facts.log_prob_sum.tolist()
    assert found.batch.num_fed_tokens.tolist() == batch.num_fed_tokens.tolist()
    assert found.batch.advantages.equal(batch.advantages) and not found.progress.num_updates
    again = found.gathered(channel)
    assert again.batch.tokens(7).prompt_ids.tolist() == tokens[7].prompt_ids.tolist()


def test_ranks_have_their_share_and_a_checkpoint_has_everything(tmp_path: Path) -> None:
    shares = run_distributed(bring, 3, tmp_path)
    count = len(VERDICTS) * GROUP_SIZE
    assert set().union(*shares) == {*range(count)}
    assert all(len(here) < count for here in shares)
