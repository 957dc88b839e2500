"""Point-to-point exchange of arrays, from the rank that holds a sequence to the ranks that need it.

There is at most one message between two ranks, a flat buffer of bytes without a header: both sides
derive its layout from lengths that every rank has. A message holds its sequences' arrays column by
column; for tokens (`token_columns`) these are prompts and responses (int32), log-probs and carried
log-probs (float32), masks of the responses that have a mask (one byte per token), versions of
carried tokens (int32), and routes (uint8).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.rollouts import COLUMNS, ROW, Rollouts, Tokens

_BEGIN_BYTES = 512
"""Bytes of a gather's first round: a ring of ranks passes them as quickly as one byte."""


class Work(Protocol):
    """A pending transfer."""

    def wait(self) -> Any:
        """Wait for the transfer to complete."""


class Channel(Protocol):
    """Point-to-point messages between ranks; messages from a rank to another keep their order."""

    @property
    def rank(self) -> int:
        """This rank's number in the channel."""

    @property
    def size(self) -> int:
        """Number of ranks in the channel."""

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Work:
        """Start sending [n] uint8 on the CPU; `buffer` must not change before completion."""

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Work:
        """Start receiving n bytes into `buffer`, [n] uint8 on the CPU."""


class GroupChannel:
    """A channel over the ranks of a gloo group, inside or outside the default process group."""

    def __init__(self, group: Any) -> None:
        """`group` is a process group. No collective."""
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
    """Pending messages, with their buffers."""

    messages: list[tuple[Work, torch.Tensor]]

    def wait(self) -> None:
        """Wait until all messages have been sent, and release the buffers.

        Nothing else tells: to gloo a message is complete once somebody has waited for it.
        """
        while self.messages:
            work, _ = self.messages[-1]
            work.wait()
            self.messages.pop()


class Column(NamedTuple):
    """Layout of an array that each of B sequences has."""

    dtype: Any
    lengths: np.ndarray
    """[B] int, number of elements of each sequence, possibly 0. The same on every rank."""


AnyRollouts = TypeVar("AnyRollouts", bound=Rollouts)


def token_columns(table: np.ndarray) -> dict[str, Column]:
    """Layout of the tokens of a table's sequences: `Rollouts.tokens`."""
    num_tokens = table["num_response_tokens"]
    lengths = {
        "prompt_ids": table["num_prompt_tokens"],
        "response_ids": num_tokens,
        "rollout_log_probs": num_tokens,
        "carried_log_probs": table["num_scored_tokens"],
        "response_masks": np.where(table["num_sampled_tokens"] < num_tokens, num_tokens, 0),
        "conversations": np.where(table["num_conversations"] > 1, num_tokens, 0),
        "carried_versions": table["num_carried_tokens"],
        "routes": table["num_routed_tokens"].astype(np.int64) * table["num_routes"],
        "notes": table["num_note_bytes"],
    }
    return {name: Column(dtype, lengths[name]) for name, dtype in COLUMNS.items()}


def post(
    arrays: Tokens,
    columns: Mapping[str, Column],
    holder: np.ndarray,
    wanted: Sequence[Sequence[int]],
    *,
    channel: Channel,
    tag: int,
) -> Posted:
    """Start sending every other rank the sequences that it wants and this rank holds.

    Args:
        arrays: this rank's arrays.
        columns: their layout, the same on every rank.
        holder: [B] int, the rank of the channel that sends each sequence; the same on every rank.
        wanted: for each rank of the channel, the numbers of the sequences it wants, ascending; the
            same on every rank. Last ranks that want nothing may be omitted.
        channel: channel of senders and receivers.
        tag: the same as the receiver's.

    Returns:
        The messages; keep them until their `wait` has returned. Does not wait for receivers.
    """
    messages: list[tuple[Work, torch.Tensor]] = []
    buffers: dict[tuple[int, ...], torch.Tensor] = {}
    here = {*np.flatnonzero(holder == channel.rank).tolist()}
    for rank, numbers in enumerate(wanted):
        if rank == channel.rank:
            continue
        # A set: a thousand ranks want a handful each, too few to benefit from an array.
        mine = tuple(sorted(here.intersection(numbers)))
        if mine:
            if mine not in buffers:  # all ranks want the first sequences of a batch
                buffers[mine] = torch.from_numpy(_pack(arrays, columns, mine))
            buffer = buffers[mine]
            messages.append((channel.send(buffer, to=rank, tag=tag), buffer))
    return Posted(messages)


def receive(
    columns: Mapping[str, Column],
    holder: np.ndarray,
    wanted: Sequence[int],
    *,
    channel: Channel,
    tag: int,
) -> dict[str, dict[int, np.ndarray]]:
    """Receive the sequences that this rank wants and others hold.

    Args:
        columns: see `post`.
        holder: see `post`.
        wanted: numbers of the sequences that this rank wants, ascending, as passed to the senders.
        channel: see `post`.
        tag: the same as the sender's.

    Returns:
        Arrays by column and sequence number, except for sequences that this rank holds itself.
    """
    numbers = np.asarray(wanted, dtype=np.int64)
    arriving = []
    for source in np.unique(holder[numbers]).tolist():
        if source == channel.rank:
            continue
        theirs = numbers[holder[numbers] == source]
        buffer = torch.empty(int(_sizes(columns, theirs).sum()), dtype=torch.uint8)
        work = channel.receive(buffer, source=source, tag=tag)
        arriving.append((work, theirs, buffer))
    received: dict[str, dict[int, np.ndarray]] = {name: {} for name in columns}
    for work, theirs, buffer in arriving:
        work.wait()
        for name, found in _unpack(buffer.numpy(), columns, theirs).items():
            received[name] |= found
    return received


def deal(
    arrays: Tokens,
    columns: Mapping[str, Column],
    holder: np.ndarray,
    wanted: Sequence[Sequence[int]],
    *,
    channel: Channel,
    tag: int,
) -> dict[str, dict[int, np.ndarray]]:
    """Post and receive: every rank of the channel calls it, with equal arguments except `arrays`.

    Returns:
        Arrays of the sequences `wanted[channel.rank]`, by column and number.
    """
    posted = post(arrays, columns, holder, wanted, channel=channel, tag=tag)
    mine = wanted[channel.rank]
    received = receive(columns, holder, mine, channel=channel, tag=tag)
    posted.wait()
    own = [i for i in mine if holder[i] == channel.rank]
    # A sequence without elements in a column (a mask, mostly) need not be held in it.
    return {
        name: {i: held[i] for i in own if columns[name].lengths[i] or i in held} | received[name]
        for name, held in arrays.items()
    }


def deal_tokens(
    rollouts: AnyRollouts, wanted: Sequence[Sequence[int]], *, channel: Channel, tag: int
) -> AnyRollouts:
    """The same rollouts with exactly the tokens of `wanted[channel.rank]` on this rank.

    Args:
        rollouts: the same on every rank except for the tokens, whose ranks are in the column
            `holder`.
        wanted: see `post`.
        channel: channel of all ranks.
        tag: the same on every rank.

    Collectives: at most one message between any two ranks.
    """
    table = rollouts.table
    tokens = deal(
        rollouts.tokens, token_columns(table), table["holder"], wanted, channel=channel, tag=tag
    )
    return rollouts.with_tokens(tokens)


def gather_tokens(rollouts: AnyRollouts, *, channel: Channel, tag: int) -> AnyRollouts:
    """The same rollouts with all tokens on rank 0 of the channel, and none on other ranks."""
    wanted = [range(len(rollouts)), *[range(0)] * (channel.size - 1)]
    return deal_tokens(rollouts, wanted, channel=channel, tag=tag)


def gather_tables(table: np.ndarray, group: dist.ProcessGroup | None) -> list[np.ndarray]:
    """Gather tables of any number of rows from all ranks.

    Args:
        table: this rank's table, [n] of `rollouts.ROW`.
        group: see `gather_bytes`.

    Returns:
        The tables by rank, on every rank.

    Collectives: `gather_bytes`.
    """
    content = np.ascontiguousarray(table).view(np.uint8)
    return [one.view(ROW) for one in gather_bytes(content, group)]


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather an object of every rank, by rank, on every rank.

    Args:
        mine: anything that pickles, small.
        group: see `gather_bytes`.

    Collectives: `gather_bytes`.
    """
    content = np.frombuffer(pickle.dumps(mine), dtype=np.uint8)
    return [pickle.loads(one.data) for one in gather_bytes(content, group)]


def gather_bytes(content: np.ndarray, group: dist.ProcessGroup | None) -> list[np.ndarray]:
    """Gather any number of bytes from all ranks.

    Args:
        content: this rank's, [n] uint8.
        group: a gloo group; None: the default group, which must be gloo.

    Returns:
        Those of each rank, by rank, on every rank: parts of one array.

    Collectives: an all-gather of n with the first bytes; if more remain on any rank, another one,
    padded to the longest.
    """
    size = np.array([len(content)], dtype=np.int64).view(np.uint8)
    begin = np.concatenate([size, content[: _BEGIN_BYTES - len(size)]])
    begins = _gather_equal(begin, _BEGIN_BYTES, group)
    counts = np.ascontiguousarray(begins[:, : len(size)]).view(np.int64)[:, 0]
    whole, longest = begins[:, len(size) :], int(counts.max())
    if longest > whole.shape[1]:
        whole = _gather_equal(content, longest, group)
    return [row[:count] for row, count in zip(whole, counts.tolist(), strict=True)]


def _gather_equal(content: np.ndarray, length: int, group: dist.ProcessGroup | None) -> np.ndarray:
    """[ranks, length] uint8 of all ranks, each padded with zeros. One all-gather."""
    padded = torch.zeros(length, dtype=torch.uint8)
    padded.numpy()[: len(content)] = content
    gathered = torch.empty((dist.get_world_size(group), length), dtype=torch.uint8)
    dist.all_gather(list(gathered), padded, group=group)
    return gathered.numpy()


def _pack(arrays: Tokens, columns: Mapping[str, Column], numbers: Sequence[int]) -> np.ndarray:
    """Pack sequences into a message, [n] uint8."""
    parts = [
        np.ascontiguousarray(arrays[name][i]).view(np.uint8)
        for name, column in columns.items()
        for i in numbers
        if column.lengths[i]
    ]
    packed = np.concatenate([np.empty(0, dtype=np.uint8), *parts])
    assert len(packed) == _sizes(columns, numbers).sum(), "arrays differ from their lengths"
    return packed


def _unpack(
    buffer: np.ndarray, columns: Mapping[str, Column], numbers: np.ndarray
) -> dict[str, dict[int, np.ndarray]]:
    """The arrays of a message, by column and number: views of `buffer`."""
    edges = _sizes(columns, numbers).cumsum()
    parts = iter(np.split(buffer, edges[:-1]))
    return {
        name: {i: next(parts).view(column.dtype) for i in numbers.tolist()}
        for name, column in columns.items()
    }


def _sizes(columns: Mapping[str, Column], numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """Bytes of every array in a message, in order."""
    index = np.asarray(numbers, dtype=np.int64)
    sizes = [
        np.dtype(column.dtype).itemsize * column.lengths[index].astype(np.int64)
        for column in columns.values()
    ]
    return np.concatenate(sizes)
