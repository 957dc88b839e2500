"""Tokens of a rank: those that plan, rounding and weight check need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.checkpoint import OpenStep, files
from gapo_megatron.config import VERIFIED_SEQUENCES, Config
from gapo_megatron.exchange import GroupChannel
from gapo_megatron.learn.plan import DataParallelRanks, bring_tokens
from gapo_megatron.objective import make_batch
from gapo_megatron.rollout.sync import first_sequences
from gapo_megatron.rollouts import COLUMNS, Batch
from tests.dist import run_distributed
from tests.learn_setup import (
    GROUP_SIZE,
    make_config,
    make_judged,
    mask_some,
    planned,
    spread,
)

# Groups without advantage come first and last; of the ten, few teach.
VERDICTS = ("wwww", "cccc", "cwww", "cwcw", *["wwww"] * 15, "cccw")
NUM_SEQUENCES = len(VERDICTS) * GROUP_SIZE


def config_of(**batch: Any) -> Config:
    sizes = {"rollout_prompts": len(VERDICTS), "minibatch_prompts": len(VERDICTS) // 2}
    return make_config(Path("unused"), batch=sizes | batch)


def batch_of(*, data_parallel_size: int) -> Batch:
    config = config_of()
    batch = make_batch(mask_some(make_judged(VERDICTS)), config.objective.resolve())
    return planned(batch, config, data_parallel_size=data_parallel_size)


def needed(batch: Batch, *, dp_rank: int) -> set[int]:
    assert batch.plan is not None
    shares = [one.microbatches[dp_rank] for one in batch.plan.minibatches]
    shares.append(batch.plan.rounding[dp_rank])
    return {i for microbatches in shares for indices in microbatches for i in indices}


def wanted_of(batch: Batch, *, every: bool = False) -> list[list[int]]:
    assert batch.plan is not None
    dp_ranks = tuple(range(len(batch.plan.rounding)))
    return [[*one] for one in DataParallelRanks(dp_ranks, dp_ranks).wanted(batch, every=every)]


@pytest.mark.parametrize("dp_size", [1, 2, 5])
def test_a_rank_wants_what_it_computes_and_no_more(dp_size: int) -> None:
    batch = batch_of(data_parallel_size=dp_size)
    wanted = wanted_of(batch)
    first = {*range(VERIFIED_SEQUENCES)}
    for dp_rank, numbers in enumerate(wanted):
        assert numbers == sorted(set(numbers))
        assert {*numbers} == needed(batch, dp_rank=dp_rank) | first
    everything = {*range(NUM_SEQUENCES)}
    assert set().union(*wanted) < everything  # what has no advantage stays where it is
    every = wanted_of(batch, every=True)
    assert set().union(*every) == everything
    # No rank gets sequences of another, and the rest is assigned once.
    added = [{*one} - {*two} for one, two in zip(every, wanted, strict=True)]
    assert sum(map(len, added)) == len(everything - set().union(*wanted))


def bring(folder: Path) -> list[int]:
    """Data-parallel ranks 0 and 1; ranks 1 and 2 are one of them. Ranks hold unequal parts."""
    rank, channel = dist.get_rank(), GroupChannel(dist.group.WORLD)
    ranks = DataParallelRanks((0, 1, 1), (0, 2))
    whole = batch_of(data_parallel_size=2)
    sampled = spread(whole, np.minimum(np.arange(NUM_SEQUENCES) // 30, 2))
    batch = bring_tokens(sampled, ranks=ranks, channel=channel)
    here = batch.rows_here
    assert {*here} == {*wanted_of(batch)[ranks.dp_ranks[rank]]} | {*sampled.rows_here}
    assert_same_tokens(batch, whole, here)
    for i in {*range(NUM_SEQUENCES)} - {*here}:
        with pytest.raises(KeyError, match=str(i)):
            batch.rollout_log_probs[i]
    first_sequences(batch, VERIFIED_SEQUENCES)  # every rank has them
    save_and_load(batch, whole, folder)
    return here


def assert_same_tokens(found: Batch, expected: Batch, rows: list[int]) -> None:
    """Tokens of exactly these rows."""
    for name in COLUMNS:
        assert found.tokens[name].keys() == {i for i in rows if i in expected.tokens[name]}, name
        for i, array in found.tokens[name].items():
            assert array.dtype == COLUMNS[name], name
            assert array.tolist() == expected.tokens[name][i].tolist(), (name, i)


def save_and_load(batch: Batch, whole: Batch, folder: Path) -> None:
    """A checkpoint has all tokens, also of sequences that no rank computes; ranks share them."""
    channel, rank = GroupChannel(dist.group.WORLD), dist.get_rank()
    opened = OpenStep(batch, {"reward/mean": 0.5}, {}).gathered(channel)
    for name, content in opened.serialised().items():
        files.write(folder / name, content)
    dist.barrier()
    if rank == 1:  # a step without an update needs nothing of one rank
        (folder / "progress_00001.pt").unlink()
    found = OpenStep.load(folder, torch.device("cpu"), num_updates=0)
    expected = whole.changed(holder=np.arange(NUM_SEQUENCES) % 3)
    assert (found.batch.table == expected.table).all()
    assert found.batch.advantages.equal(batch.advantages) and not found.progress.num_updates
    for one in (found, found.gathered(channel)):
        assert_same_tokens(one.batch, whole, [*range(NUM_SEQUENCES)])


def test_ranks_have_their_share_and_a_checkpoint_has_everything(tmp_path: Path) -> None:
    shares = run_distributed(bring, 3, tmp_path)
    assert set().union(*shares) == {*range(NUM_SEQUENCES)}
    assert all(len(here) < NUM_SEQUENCES for here in shares)
