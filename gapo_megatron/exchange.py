"""Tokens travel once: from the rank that has a sequence, point to point, to those that compute it.

Between two ranks there is one message at most, a flat buffer of bytes without any description:
both sides know what is in it from the facts, which every rank has. A message holds its sequences'
prompts, responses (int32), log-probs, carried log-probs (float32) and, of sequences with tokens
that the environment gave, masks (a byte a token), each kind of all sequences in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.facts import Facts, Tokens


class Work(Protocol):
    """A transfer under way."""

    def is_completed(self) -> bool:
        """Whether it is done. Never waits."""

    def wait(self) -> Any:
        """Return when it is done."""


class Channel(Protocol):
    """Messages between ranks, from point to point; they keep their order from one to another."""

    @property
    def rank(self) -> int:
        """This rank's number in the channel."""

    @property
    def size(self) -> int:
        """Number of its ranks."""

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Work:
        """Begin to send [n] uint8 on the CPU; `buffer` must not change before the work is done."""

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Work:
        """Begin to receive as many bytes into `buffer`, [n] uint8 on the CPU."""


class GroupChannel:
    """A channel over the ranks of a gloo group, within the default world or outside of it."""

    def __init__(self, group: Any) -> None:
        """`group`: a process group; no collective."""
        self._group = group

    @property
    def rank(self) -> int:
        return int(self._group.rank())

    @property
    def size(self) -> int:
        return int(self._group.size())

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Work:
        work: Work = self._group.send([buffer], to, tag)
        return work

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Work:
        work: Work = self._group.recv([buffer], source, tag)
        return work


@dataclass
class Posted:
    """Messages on their way, with their buffers."""

    messages: list[tuple[Work, torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(len(buffer) for _, buffer in self.messages)

    def is_done(self) -> bool:
        """Whether all have been sent. Never waits."""
        return all(work.is_completed() for work, _ in self.messages)

    def wait(self) -> None:
        """Return when all have been sent, and let go of the buffers."""
        while self.messages:
            work, _ = self.messages[-1]
            work.wait()
            self.messages.pop()


def post(
    held: Mapping[int, Tokens],
    facts: Facts,
    wanted: Sequence[Sequence[int]],
    *,
    channel: Channel,
    tag: int,
) -> Posted:
    """Begin to send every other rank the sequences that it wants and this rank holds.

    Args:
        held: by number those that this rank has, all with `facts.holder` = its rank among them.
        facts: the same on every rank.
        wanted: per rank of the channel the numbers of the sequences it wants, ascending; the same
            on every rank. A rank at the end that wants nothing may be left out.
        channel: joins the ranks that hold and those that want.
        tag: the same as the receiver's.

    Returns:
        The messages; keep them until their `wait` has returned. Nothing here waits for a receiver.
    """
    messages: list[tuple[Work, torch.Tensor]] = []
    here = {*np.flatnonzero(facts.holder == channel.rank).tolist()}
    for rank, numbers in enumerate(wanted):
        if rank == channel.rank:
            continue
        # A set: a thousand ranks want a handful each, too few for an array to pay.
        mine = sorted(here.intersection(numbers))
        if mine:
            buffer = torch.from_numpy(pack([held[i] for i in mine], facts.take(mine)))
            messages.append((channel.send(buffer, to=rank, tag=tag), buffer))
    return Posted(messages)


def receive(
    facts: Facts, wanted: Sequence[int], *, channel: Channel, tag: int
) -> dict[int, Tokens]:
    """Receive the sequences that this rank wants and others hold.

    Args:
        facts: the same on every rank.
        wanted: numbers of the sequences that this rank wants, ascending, as those who send know it.
        channel: as of `post`.
        tag: the same as the sender's.

    Returns:
        By number. Those that this rank holds itself are left out.
    """
    numbers = np.asarray(wanted, dtype=np.int64)
    arriving = []
    for source in np.unique(facts.holder[numbers]).tolist():
        if source == channel.rank:
            continue
        theirs = numbers[facts.holder[numbers] == source]
        buffer = torch.empty(message_bytes(facts.take(theirs)), dtype=torch.uint8)
        work = channel.receive(buffer, source=source, tag=tag)
        arriving.append((work, theirs, buffer))
    received: dict[int, Tokens] = {}
    for work, theirs, buffer in arriving:
        work.wait()
        tokens = unpack(buffer.numpy(), facts.take(theirs))
        received |= zip(theirs.tolist(), tokens, strict=True)
    return received


def deal(
    held: Mapping[int, Tokens],
    facts: Facts,
    wanted: Sequence[Sequence[int]],
    *,
    channel: Channel,
    tag: int,
) -> dict[int, Tokens]:
    """Post and receive: every rank of the channel calls it with the same `facts` and `wanted`.

    Returns:
        The sequences `wanted[channel.rank]`, by number and in that order.
    """
    posted = post(held, facts, wanted, channel=channel, tag=tag)
    mine = wanted[channel.rank]
    received = receive(facts, mine, channel=channel, tag=tag)
    posted.wait()
    return {i: received[i] if i in received else held[i] for i in mine}


def gather(
    held: Mapping[int, Tokens], facts: Facts, *, channel: Channel, tag: int
) -> dict[int, Tokens]:
    """Bring all sequences to rank 0 of the channel; elsewhere the result is empty."""
    wanted = [range(len(facts)), *[range(0)] * (channel.size - 1)]
    return deal(held, facts, wanted, channel=channel, tag=tag)


def gather_rows(rows: np.ndarray, group: dist.ProcessGroup | None) -> list[np.ndarray]:
    """Gather int32 tables of the same columns and any number of rows from all ranks.

    Args:
        rows: [n, C] int32, this rank's.
        group: a gloo group; None: the default one, of gloo.

    Returns:
        By rank, on every rank.

    Collectives: two all-gathers, whatever there is to gather: one of n, one of the tables, padded
    to the longest.
    """
    num_ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([len(rows)]), group=group)
    counts = [int(size) for size in sizes]
    padded = torch.zeros((max(1, *counts), rows.shape[1]), dtype=torch.int32)
    padded[: len(rows)] = torch.from_numpy(rows)
    tables = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(tables, padded, group=group)
    return [table[:count].numpy() for table, count in zip(tables, counts, strict=True)]


def message_bytes(facts: Facts) -> int:
    """Bytes of one message with these sequences."""
    return int(_sizes(facts).sum())


def pack(tokens: Sequence[Tokens], facts: Facts) -> np.ndarray:
    """One message, [n] uint8; `facts` are those of `tokens`."""
    masks = [
        one.response_mask
        for one, is_masked in zip(tokens, _is_masked(facts).tolist(), strict=True)
        if is_masked and one.response_mask is not None
    ]
    parts = [
        *(one.prompt_ids for one in tokens),
        *(one.response_ids for one in tokens),
        *(one.rollout_log_probs for one in tokens),
        *(one.carried_log_probs for one in tokens),
        *masks,
    ]
    none = np.empty(0, dtype=np.uint8)
    packed = np.concatenate([none, *(np.ascontiguousarray(part).view(np.uint8) for part in parts)])
    assert len(packed) == message_bytes(facts), "tokens that are not those of their facts"
    return packed


def unpack(buffer: np.ndarray, facts: Facts) -> list[Tokens]:
    """The sequences of a message: views of `buffer`, one for each row of `facts`."""
    edges = _sizes(facts).cumsum()
    assert len(buffer) == (edges[-1] if len(edges) else 0), "a message that is not of these facts"
    parts = np.split(buffer, edges[:-1])
    count = len(facts)
    masks = iter(parts[4 * count :])
    is_masked = _is_masked(facts).tolist()
    return [
        Tokens(
            parts[i].view(np.int32),
            parts[count + i].view(np.int32),
            parts[2 * count + i].view(np.float32),
            parts[3 * count + i].view(np.float32),
            next(masks).view(bool) if is_masked[i] else None,
        )
        for i in range(count)
    ]


def _is_masked(facts: Facts) -> np.ndarray:
    masked: np.ndarray = facts.num_sampled_tokens < facts.num_response_tokens
    return masked


def _sizes(facts: Facts) -> np.ndarray:
    """Bytes of every part of a message, in order."""
    words = [facts.num_prompt_tokens, facts.num_response_tokens, facts.num_response_tokens]
    words.append(facts.num_carried_tokens)
    masks = facts.num_response_tokens[_is_masked(facts)]
    return np.concatenate([*(4 * part.astype(np.int64) for part in words), masks.astype(np.int64)])
