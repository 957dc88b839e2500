"""Facts go to every rank, tokens to those that want them: the same bits, and no byte more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron import exchange
from gapo_megatron.exchange import GroupChannel, deal, gather_rows, message_bytes
from gapo_megatron.facts import Facts, Spread, Tokens
from gapo_megatron.objective import METHODS, make_batch
from gapo_megatron.rollout.describe import describe, to_open_group
from gapo_megatron.types import Carried, Group, OpenGroup, Outcome, Prompt, Rollout, Verdict
from tests.dist import run_distributed
from tests.messages import mentions

GROUP_SIZE = 3


def make_groups(rank: int, count: int) -> list[Group]:
    """Prompts and responses of any length, some with carried tokens, some with masks."""
    random = np.random.default_rng(rank)

    def rollout(sample: int) -> Rollout:
        length = int(random.integers(1, 40))
        carried = mask = None
        if sample == 1:
            num_carried = int(random.integers(1, length + 1))
            carried = Carried(3, -random.random(num_carried, dtype=np.float32))
        if sample == 2 and length > 1:
            mask = random.random(length) < 0.5
            mask[0], mask[-1] = True, False
        return Rollout(
            random.integers(0, 1000, length).astype(np.int32),
            -random.random(length, dtype=np.float32),
            truncated=bool(random.random() < 0.5),
            carried=carried,
            response_mask=mask,
        )

    return [
        Group(
            Prompt(f"{rank}/{i}", tuple(random.integers(0, 1000, rank + i + 1).tolist()), ""),
            tuple(rollout(sample) for sample in range(GROUP_SIZE)),
            tuple(Verdict(one) for one in (Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN)),
        )
        for i in range(count)
    ]


def same(one: Tokens, other: Tokens) -> bool:
    names = ("prompt_ids", "response_ids", "rollout_log_probs", "carried_log_probs")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    masks = one.response_mask, other.response_mask
    if (masks[0] is None) != (masks[1] is None):
        return False
    if masks[0] is not None:
        pairs.append(masks)
    return all(a.dtype == b.dtype and a.tolist() == b.tolist() for a, b in pairs)


def spread_over_ranks(counts: Sequence[int]) -> Spread:
    rank = dist.get_rank()
    facts, tokens = describe(make_groups(rank, counts[rank]), policy_version=7, holder=rank)
    tables = gather_rows(facts.table, None)
    return Spread.join(
        Spread(Facts(table), dict(enumerate(tokens)) if source == rank else {})
        for source, table in enumerate(tables)
    )


def over_ranks(counts: Sequence[int], wanted: list[list[int]]) -> tuple[bytes, list[int]]:
    """What arrives is what a gather of everything would have brought; some ranks hold nothing."""
    rank = dist.get_rank()
    everything = [group for r, count in enumerate(counts) for group in make_groups(r, count)]
    whole, expected = describe(everything)
    spread = spread_over_ranks(counts)
    for name in ("num_prompt_tokens", "num_response_tokens", "num_sampled_tokens", "outcome"):
        assert getattr(spread.facts, name).tolist() == getattr(whole, name).tolist()
    assert spread.facts.log_prob_sum.tolist() == whole.log_prob_sum.tolist()
    found = deal(spread.held, spread.facts, wanted, channel=GroupChannel(dist.group.WORLD), tag=1)
    assert [*found] == wanted[rank]
    assert all(same(found[i], expected[i]) for i in found)
    on_first = exchange.gather(
        spread.held, spread.facts, channel=GroupChannel(dist.group.WORLD), tag=1
    )
    assert [*on_first] == ([*range(len(expected))] if rank == 0 else [])
    assert all(same(on_first[i], expected[i]) for i in on_first)
    return spread.facts.to_bytes(), spread.facts.holder.tolist()


def test_every_rank_gets_the_facts_and_the_tokens_it_wants() -> None:
    counts = [3, 0, 2, 1]  # groups of three
    wanted = [[0, 5, 9, 17], [*range(18)], [], [1, 2, 16, 17]]
    results = run_distributed(over_ranks, 4, counts, wanted)
    assert results == [results[0]] * 4
    assert results[0][1] == [0] * 9 + [2] * 6 + [3] * 3


def count_collectives(counts: Sequence[int]) -> int:
    with patch.object(dist, "all_gather", wraps=dist.all_gather) as calls:
        spread_over_ranks(counts)
    return calls.call_count


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 0), (5, 20, 1)])
def test_facts_take_two_collectives_however_many_there_are(counts: tuple[int, ...]) -> None:
    assert run_distributed(count_collectives, 3, counts) == [2, 2, 2]


class CountingChannel:
    """One rank of many; nobody is there to receive."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: dict[int, int] = {}

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Any:
        assert to not in self.sent, "two messages between two ranks"
        self.sent[to] = len(buffer)
        return None

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Any:
        raise AssertionError("not here")


def test_a_rank_receives_its_share_alone_however_many_ranks_there_are() -> None:
    """Eight sequences are held, and eight others wanted, by each rank."""
    received, sent = set(), set()
    for num_ranks in (8, 64, 256):
        one = Tokens(
            np.zeros(5, np.int32), np.zeros(9, np.int32), np.zeros(9, np.float32), np.zeros(0)
        )
        count = 8 * num_ranks
        facts = Facts.of([one] * count)
        facts.holder[:] = np.arange(count) // 8
        wanted = [[*range(rank, count, num_ranks)] for rank in range(num_ranks)]
        received.add(message_bytes(facts.take(wanted[3])))
        channel = CountingChannel(3, num_ranks)
        posted = exchange.post(
            dict.fromkeys(range(24, 32), one), facts, wanted, channel=channel, tag=1
        )
        assert posted.num_bytes == sum(channel.sent.values())
        sent.add(posted.num_bytes)
        assert 3 not in channel.sent
    assert received == {8 * 4 * (5 + 9 + 9)} and sent <= {7 * 92, 8 * 92}


def test_a_sequence_that_is_not_here_is_not_to_be_had() -> None:
    facts, tokens = describe(make_groups(0, 2))

    batch = make_batch(facts, METHODS["gapo"]).with_tokens({1: tokens[1], 4: tokens[4]})
    assert same(batch.tokens(4), tokens[4])
    assert len(batch) == 6 and batch.num_response_tokens.tolist() == [
        *facts.num_sampled_tokens.tolist()
    ]
    for name in ("prompt_ids", "response_ids", "rollout_log_probs", "response_masks"):
        with pytest.raises(KeyError, match=mentions("sequence 3")):
            getattr(batch, name)[3]
        with pytest.raises(KeyError, match=mentions("sequence 0")):
            list(getattr(batch, name))
    with pytest.raises(KeyError):  # held, and not by this rank
        facts = facts.changed(holder=0)
        wanted = [[], [0, 1]]
        exchange.post({1: tokens[1]}, facts, wanted, channel=CountingChannel(0, 2), tag=1)


def test_facts_travel_as_bytes_and_in_any_order() -> None:
    facts, tokens = describe(make_groups(5, 4), problems=[9, 1, 70_000, 3], policy_version=11)
    again = Facts.from_bytes(facts.to_bytes())
    assert again.table.tolist() == facts.table.tolist() and again.table.flags.writeable
    assert again.group_size == GROUP_SIZE
    assert again.problem[::GROUP_SIZE].tolist() == [9, 1, 70_000, 3]
    assert again.oldest_version.tolist() == [11, 3, 11] * 4
    assert again.rewards.tolist()[:2] == [1.0, 0.0] and np.isnan(again.rewards[2])
    sums = [float(one.rollout_log_probs.sum(dtype=np.float64)) for one in tokens]
    assert again.log_prob_sum.tolist()[0] == sums[0]
    rows = [7, 0, 11]
    taken = Spread(facts, dict(enumerate(tokens))).take(rows)
    assert taken.facts.table.tolist() == facts.table[rows].tolist()
    assert all(taken.held[i] is tokens[row] for i, row in enumerate(rows))


def test_an_open_group_comes_back_as_it_was() -> None:
    (group,) = make_groups(2, 1)
    mask = np.array([True, False, True])
    unfinished = Rollout(
        np.array([4, 5, 6], np.int32), np.zeros(3, np.float32), False, False, None, mask
    )
    opened = OpenGroup(group.prompt, (*group.rollouts[:2], unfinished))
    facts, tokens = describe([opened])
    found = to_open_group(Prompt(group.prompt.id, (), ""), facts, tokens)
    assert found.prompt == group.prompt
    for one, expected in zip(found.rollouts, opened.rollouts, strict=True):
        assert one.token_ids.tolist() == expected.token_ids.tolist()
        assert (one.truncated, one.finished) == (expected.truncated, expected.finished)
        assert one.is_sampled.tolist() == expected.is_sampled.tolist()
        assert (one.carried is None) == (expected.carried is None)
        if one.carried and expected.carried:
            assert one.carried.oldest_version == expected.carried.oldest_version
            assert one.carried.old_log_probs.tolist() == expected.carried.old_log_probs.tolist()
