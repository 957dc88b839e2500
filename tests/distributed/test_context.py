"""Context parallelism: each rank's share."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gapo_megatron.batching import pack
from gapo_megatron.errors import DivergenceError
from gapo_megatron.learn import score as score_module
from gapo_megatron.learn.score import log_probs
from gapo_megatron.logprob import token_log_probs
from gapo_megatron.policy import destroy
from gapo_megatron.policy.context import cut, held_positions, num_chunks
from tests.dist import run_distributed
from tests.distributed.policy_setup import (
    load_policy,
    make_batch,
    make_config,
    save_model,
)
from tests.messages import mentions


def sequence_that_is_named(folder: Path, poisoned: int) -> str:
    """The error of the rank that holds the last row of a sequence, which is not finite."""
    config = make_config(folder, parallel={"context_parallel_size": 2})
    policy = load_policy(config)
    microbatch = policy.pack(make_batch(), (2, 5, 1))
    is_poisoned = microbatch.sequence_ids[microbatch.rows] == poisoned
    bad = microbatch.row_index[is_poisoned][-1:]
    # The sequence's last chunk is the first rank's, with its first one.
    bad = bad if policy.groups.cp_rank == 0 else bad[:0]

    def with_nan(hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        return token_log_probs(hidden.index_fill(0, bad, torch.nan), *args, **options)

    try:
        with patch.object(score_module, "token_log_probs", with_nan):
            log_probs(policy, [microbatch])
    except DivergenceError as error:
        return str(error)
    finally:
        destroy()
    return ""


def test_a_row_that_is_not_finite_is_named_by_its_sequence(tmp_path: Path) -> None:
    """The row is one of the rank's share."""
    save_model(tmp_path, "qwen2_tied")
    first, second = run_distributed(sequence_that_is_named, 2, tmp_path, 1)
    assert re.search(mentions("micro-batch 0", "sequence 5"), first) and second == ""


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_every_position_is_held_once_and_attention_costs_all_the_same(cp_size: int) -> None:
    lengths = [2 * cp_size * n for n in (1, 5, 3, 40)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    held = [held_positions(bounds, cp_rank=r, cp_size=cp_size) for r in range(cp_size)]
    assert sorted(torch.cat(held).tolist()) == list(range(sum(lengths)))
    starts = bounds[:-1].repeat_interleave(torch.tensor(lengths))
    costs = [int((positions - starts[positions] + 1).sum()) for positions in held]
    assert len(set(costs)) == 1  # keys that a rank's queries see
    # As Transformer Engine has it: sequence after sequence, and in each of them in order.
    for positions in held:
        assert positions.tolist() == sorted(positions.tolist())


@pytest.mark.parametrize("cp_size", [2, 4])
def test_shares_make_up_the_whole(cp_size: int) -> None:
    batch = make_batch()
    chunks = num_chunks(cp_size)
    whole = pack(batch, (5, 0, 3), align=3 * chunks, sequence_align=chunks, device="cpu")
    assert whole.tokens.shape[1] % (3 * chunks) == 0
    assert (whole.cu_seqlens % chunks == 0).all()
    plain = pack(batch, (5, 0, 3), device="cpu")
    # Nothing that is scored has moved within its sequence.
    for packed in (whole, plain):
        predicted_from = packed.tokens[0, packed.row_index]
        inside = packed.position_ids[0, packed.row_index]
        assert (predicted_from.tolist(), inside.tolist()) == (
            plain.tokens[0, plain.row_index].tolist(),
            plain.position_ids[0, plain.row_index].tolist(),
        )
    rows = []
    for rank in range(cp_size):
        part = cut(whole, SimpleNamespace(cp_rank=rank, cp_size=cp_size))
        assert part.rows is not None
        assert part.tokens.shape == part.position_ids.shape == (1, whole.tokens.shape[1] // cp_size)
        for name in ("tokens", "position_ids"):
            here, there = (getattr(one, name)[0, one.row_index] for one in (part, whole))
            assert torch.equal(here, there[part.rows]), name
        assert torch.equal(part.labels, whole.labels[part.rows])
        # What the loss reads is of all rows: it is computed on every rank of the group.
        assert torch.equal(part.sequence_ids, whole.sequence_ids)
        assert torch.equal(part.rollout_log_probs, whole.rollout_log_probs)
        rows += part.rows.tolist()
    assert sorted(rows) == list(range(len(whole.labels)))


def test_the_layout_is_transformer_engines() -> None:
    bounds = torch.tensor([0, 8, 12])
    assert held_positions(bounds, cp_rank=0, cp_size=2).tolist() == [0, 1, 6, 7, 8, 11]
    assert held_positions(bounds, cp_rank=1, cp_size=2).tolist() == [2, 3, 4, 5, 9, 10]


def test_one_rank_keeps_the_whole() -> None:
    whole = pack(make_batch(), (0, 1), device="cpu")
    assert cut(whole, SimpleNamespace(cp_rank=0, cp_size=1)) is whole and whole.rows is None
