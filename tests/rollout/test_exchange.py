"""Every rank gets the table, and exactly the tokens it wants, bitwise."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.exchange import (
    GroupChannel,
    deal_tokens,
    gather_bytes,
    gather_objects,
    gather_tables,
    gather_tokens,
    post,
    token_columns,
)
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.rollouts import Rollouts
from tests.batches import random_rollouts, readable
from tests.dist import run_distributed


def sampled_by(rank: int, counts: Sequence[int]) -> Rollouts:
    return random_rollouts(rank, counts[rank], holder=rank)


def spread_over_ranks(counts: Sequence[int]) -> Rollouts:
    rank = dist.get_rank()
    mine = sampled_by(rank, counts)
    parts = [
        mine if i == rank else Rollouts(one)
        for i, one in enumerate(gather_tables(mine.table, None))
    ]
    replicas = Replicas(rank=rank, world_size=len(counts), size=1)
    rollouter = cast(Any, SimpleNamespace(_engine=SimpleNamespace(replicas=replicas)))
    joined, whole = Rollouter._join_ranks(rollouter, mine), Rollouts.join(parts)
    assert joined.table.tobytes() == whole.table.tobytes()
    assert readable(joined) == readable(whole)
    return joined


def over_ranks(counts: Sequence[int], wanted: list[list[int]]) -> list[int]:
    """Received tokens equal those of a full gather; some ranks hold none."""
    rank, channel = dist.get_rank(), GroupChannel(dist.group.WORLD)
    whole = Rollouts.join(sampled_by(source, counts) for source in range(len(counts)))
    spread = spread_over_ranks(counts)
    assert spread.table.tobytes() == whole.table.tobytes()
    on_first = [*range(len(whole))] if rank == 0 else []
    for found, rows in (
        (deal_tokens(spread, wanted, channel=channel, tag=1), wanted[rank]),
        (gather_tokens(spread, channel=channel, tag=1), on_first),
    ):
        assert found.rows_here == rows and found.table is spread.table
        assert readable(found) == {
            name: {row: held[row] for row in rows if row in held}
            for name, held in readable(whole).items()
        }
    return spread.table["holder"].tolist()


def test_every_rank_gets_the_table_and_the_tokens_it_wants() -> None:
    counts = [3, 0, 2, 1]  # groups of three
    wanted = [[0, 5, 9, 17], [*range(18)], [], [1, 2, 16, 17]]
    holder = [0] * 9 + [2] * 6 + [3] * 3
    assert run_distributed(over_ranks, 4, counts, wanted) == [holder] * 4


def gathered(contents: list[bytes]) -> tuple[list[bytes], list[Any], int]:
    """What a rank gathers, as bytes and as objects, and the collectives of the first."""
    mine = np.frombuffer(contents[dist.get_rank()], dtype=np.uint8)
    real = dist.all_gather
    with patch.object(dist, "all_gather", side_effect=real) as counted:
        found = [one.tobytes() for one in gather_bytes(mine, None)]
    objects = gather_objects({"of": contents[dist.get_rank()]}, None)
    return found, objects, counted.call_count


@pytest.mark.parametrize(("longest", "num_collectives"), [(0, 1), (504, 1), (505, 2), (70_000, 2)])
def test_contents_of_any_length_are_gathered_by_rank(longest: int, num_collectives: int) -> None:
    contents = [b"one", b"", np.random.default_rng(0).bytes(longest)]
    found = run_distributed(gathered, 3, contents)
    assert found == [(contents, [{"of": one} for one in contents], num_collectives)] * 3


class CountingChannel:
    """A single rank of many; returns bytes of its messages by peer."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Any:
        return self._count(self.sent, to, buffer)

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Any:
        return self._count(self.received, source, buffer)

    def _count(self, counts: dict[int, int], other: int, buffer: torch.Tensor) -> Any:
        assert other not in counts, "two messages between two ranks"
        assert other != self.rank
        counts[other] = len(buffer)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("num_ranks", [8, 64, 256])
def test_a_rank_sends_and_receives_its_share_alone(num_ranks: int) -> None:
    """Each rank holds eight sequences and wants eight others, for any number of ranks."""
    count = 8 * num_ranks
    ids = [np.zeros(n, np.int32) for n in (5, 9)]
    everything = Rollouts.of(*([one] * count for one in ids), [np.zeros(9, np.float32)] * count)
    spread = everything.changed(holder=np.arange(count) // 8).with_tokens(
        {
            name: {row: array for row, array in held.items() if 24 <= row < 32}
            for name, held in everything.tokens.items()
        }
    )
    channel = CountingChannel(3, num_ranks)
    wanted = [[*range(rank, count, num_ranks)] for rank in range(num_ranks)]
    assert deal_tokens(spread, wanted, channel=channel, tag=1).rows_here == wanted[3]
    # Of eight ranks each has one of the eight that another wants.
    num_others = 7 if num_ranks == 8 else 8
    sequence_bytes = 4 * (5 + 9 + 9)
    assert sum(channel.received.values()) == num_others * sequence_bytes
    assert sum(channel.sent.values()) == num_others * sequence_bytes


def test_ranks_that_want_the_same_get_the_same_buffer() -> None:
    """A thousand ranks want the first sequences of a batch: they are packed once."""
    rollouts = random_rollouts(0, 2).changed(holder=0)
    wanted = [[], [0, 1], [1], [0, 1]]
    posted = post(
        rollouts.tokens,
        token_columns(rollouts.table),
        rollouts.table["holder"],
        wanted,
        channel=CountingChannel(0, 4),
        tag=1,
    )
    first, second, third = (buffer for _, buffer in posted.messages)
    assert first is third and first is not second


def test_a_rank_cannot_send_what_it_does_not_have() -> None:
    rollouts = random_rollouts(0, 2)
    nothing = Rollouts(rollouts.table)
    with pytest.raises(KeyError, match=r"\bsequence 1\b"):
        deal_tokens(nothing, [[], [1]], channel=CountingChannel(0, 2), tag=1)
