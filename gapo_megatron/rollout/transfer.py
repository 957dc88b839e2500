"""Send sharded parameters from the ranks that train to ranks that only generate.

Nobody gathers on the side that trains. A bucket (`policy.export.buckets`) is cut, all its shards
one after another, into one range for each receiver. A rank that holds a shard sends each receiver
the part of its range that lies in this shard; ranks with the same shard take turns. The receivers
then exchange their ranges. With W bytes, T ranks that train and G receivers, a trainer sends W / T,
and a receiver gets W: W / G from the trainers, the rest from the other receivers.

Both sides compute the same buckets, so no message has a header; whether they do is compared before
the first one. A rank that fails ends: the others' operations fail with its connections (gloo), or
after their time limit, unless the launcher ends the job before (NCCL).

An engine may hold tensors: vLLM keeps those of a fused module (query, key and value; gate and up;
all experts of a layer) until the last of them has arrived. So every bucket is received into new
memory, which is freed when none of its tensors is referenced. Memory beside the weights, where a
parameter that is larger than a bucket counts as one:

- trainer: its shards of two buckets;
- receiver: tensors held by the engine, in whole buckets; a bucket being yielded, one being
  exchanged and one being received. A parameter of several shards is copied to put it together.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.compat.torch_groups import OutsideGroup
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.models.rules import Place, Rule
from gapo_megatron.policy.export import Bucket, Exported, buckets

T = TypeVar("T")

TRANSFER_BYTES = {"cuda": 2**28, "cpu": 2**25}
"""Bytes of a bucket of whole parameters, by device type."""
_ALIGNMENT = 128
"""Elements of which a range is a multiple: between unaligned addresses NCCL copies slowly."""


@dataclass(slots=True)
class Route:
    """Groups over which parameters travel; in those of all ranks the trainers come first."""

    texts: OutsideGroup
    """All ranks, gloo: the end. It may be the group of other messages, which need not have
    arrived; a time-out here ends those too."""
    pieces: OutsideGroup
    """All ranks, on the parameters' device: from trainers to receivers."""
    receivers: OutsideGroup | None
    """The receivers, on that device; None on a trainer."""
    bucket_bytes: int
    """Largest size of a bucket, unless a parameter is larger."""


class Message(NamedTuple):
    """Part of a bucket that a trainer sends to a receiver; elements of all shards in a row."""

    sender: int
    """Number of the trainer."""
    receiver: int
    """Number among the receivers."""
    shard: int
    start: int
    stop: int


class Planned(NamedTuple):
    """How a bucket travels."""

    bucket: Bucket
    range_numel: int
    """Elements of a receiver's range; the last ranges may reach beyond the bucket."""
    messages: list[Message]


def plan(exported: Exported, *, num_receivers: int, bucket_bytes: int) -> Iterator[Planned]:
    """Yield every bucket and its messages, in order; the same on every rank.

    A rank's messages of a bucket are consecutive. If a bucket has fewer messages than ranks hold
    the shard, other ranks send the next bucket's.

    Args:
        exported: what is sent.
        num_receivers: ranks that receive.
        bucket_bytes: see `Route`.
    """
    turns: dict[tuple[int, str, int], int] = {}
    for bucket in buckets(exported, bucket_bytes=bucket_bytes):
        numel = bucket.shard_numel
        size = -(-bucket.num_shards * numel // (num_receivers * _ALIGNMENT)) * _ALIGNMENT
        messages = []
        for shard, ranks in enumerate(exported.holders(bucket.stage, bucket.group)):
            first, end = shard * numel, (shard + 1) * numel
            receivers = range(first // size, -(-end // size))
            # Each sender has a row of messages, so that it needs only a part of the shard.
            num_senders = min(len(ranks), len(receivers))
            turn = turns.get((bucket.stage, bucket.group, shard), 0)
            for position, receiver in enumerate(receivers):
                sender = ranks[(turn + position * num_senders // len(receivers)) % len(ranks)]
                start, stop = max(first, receiver * size), min(end, (receiver + 1) * size)
                messages.append(Message(sender, receiver, shard, start, stop))
            is_all = num_senders == len(ranks)  # then one may have a message more than another
            turns[bucket.stage, bucket.group, shard] = turn + (1 if is_all else num_senders)
        yield Planned(bucket, size, messages)


def send(exported: Exported, shard_of: Callable[[str], Tensor], route: Route) -> None:
    """Send this rank's part of all parameters. Call it on every rank that trains.

    By its return every receiver has received everything.

    Args:
        exported: what is sent; the same on every rank.
        shard_of: returns this rank's shard of a parameter for a name by the rules, with global
            numbers; called in any order, maybe never. It must not use collectives. The tensor must
            not change before the return.
        route: the groups to send over.

    Collectives: over all ranks a maximum at the beginning and one at the end, messages between.

    Raises:
        WeightSyncError: another rank is gone, does not take part within the groups' time limit, or
            expects other parameters; or a shard has another dtype or size.
        Exception: whatever `shard_of` raises; the process must then end.
    """
    num_receivers = _begin(exported, route)
    sending: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
    outgoing = _outgoing(exported, route, num_receivers)
    # A bucket of another dtype is one buffer of the model, and needs none of these.
    longest = max((part.buffered_numel for part in outgoing), default=0)
    buffers = torch.empty(2, longest, dtype=exported.dtype, device=route.pieces.device)
    for turn, one in enumerate(outgoing):
        if len(sending) == 2:
            _finish(route.pieces, sending.popleft()[0], "an earlier bucket")
        contents = one.contents(shard_of, buffers[turn % 2])
        to = [exported.num_ranks + message.receiver for message in one.messages]
        with _naming(f"bucket {one.number}"):
            works = route.pieces.send_all([*zip(contents, to, strict=True)], tag=one.number)
        sending.append((works, contents))
        del contents
    while sending:
        _finish(route.pieces, sending.popleft()[0], "the last buckets")
    _end(route)


class _Outgoing(NamedTuple):
    """What this rank sends of a bucket."""

    number: int
    bucket: Bucket
    messages: list[Message]
    """Not empty; consecutive elements of one shard."""

    @property
    def span(self) -> tuple[int, int]:
        """First element and end, within the shard."""
        first = self.messages[0].shard * self.bucket.shard_numel
        return self.messages[0].start - first, self.messages[-1].stop - first

    @property
    def buffered_numel(self) -> int:
        """Elements that are put together in a buffer."""
        start, stop = self.span
        return stop - start if len(self.bucket.parts) > 1 else 0

    def contents(self, shard_of: Callable[[str], Tensor], buffer: Tensor) -> list[Tensor]:
        """The messages' contents, in `buffer` or in a parameter's memory; see `Bucket.pieces`."""
        start, stop = self.span
        pieces = self.bucket.pieces(self.messages[0].shard, shard_of, start=start, stop=stop)
        flat = pieces[0]
        if len(pieces) > 1:
            flat = torch.cat(pieces, out=buffer[: stop - start])
        return [*flat.split([one.stop - one.start for one in self.messages])]


def _outgoing(exported: Exported, route: Route, num_receivers: int) -> list[_Outgoing]:
    """What this rank sends, in order."""
    planned = plan(exported, num_receivers=num_receivers, bucket_bytes=route.bucket_bytes)
    own = (
        (number, one.bucket, [each for each in one.messages if each.sender == route.pieces.rank])
        for number, one in enumerate(planned)
    )
    return [_Outgoing(*one) for one in own if one[-1]]


def receive(exported: Exported, route: Route) -> Iterator[tuple[Rule, Place, Tensor]]:
    """Yield every parameter once, whole, without tied copies; bitwise what the trainers hold.

    Call it on every rank that receives, and consume it completely: all others wait for that, until
    their time limit. A receiver may hold a tensor for any time; this may keep its whole bucket
    alive.

    Args:
        exported: what is sent; the same on every rank.
        route: the groups to receive over.

    Yields:
        As `policy.export.whole_parameters`.

    Collectives: those of `send`; over the receivers a maximum at the beginning, and a gather for
    each bucket.

    Raises:
        WeightSyncError: another rank is gone, does not take part within the groups' time limit, or
            expects other parameters. The tensors yielded so far are then not the weights of any
            version.
    """
    num_receivers = _begin(exported, route)
    planned = plan(exported, num_receivers=num_receivers, bucket_bytes=route.bucket_bytes)
    coming = (
        _start(exported, route, number, one, num_receivers) for number, one in enumerate(planned)
    )
    exchanged = (_exchange(arrival, route) for arrival in _ahead(coming))
    for arrival in _ahead(exchanged):
        _finish(route.receivers, arrival.works, f"bucket {arrival.number}")
        yield from arrival.whole()
        del arrival  # before memory for another bucket is needed
    _end(route)


@dataclass(slots=True)
class _Arrival:
    """A bucket that arrives."""

    number: int
    bucket: Bucket
    ranges: Tensor
    """[receivers, range_numel]: the shards one after another."""
    works: list[dist.Work]

    def whole(self) -> Iterator[tuple[Rule, Place, Tensor]]:
        """Yield the parameters."""
        shards, numel = self.bucket.num_shards, self.bucket.shard_numel
        memory = self.ranges.view(-1)[: shards * numel]
        return self.bucket.whole([*memory.view(shards, numel)])


def _start(
    exported: Exported, route: Route, number: int, planned: Planned, num_receivers: int
) -> _Arrival:
    """Start receiving this rank's range of a bucket."""
    me = route.pieces.rank - exported.num_ranks
    device, size = route.pieces.device, planned.range_numel
    ranges = torch.empty(num_receivers, size, dtype=planned.bucket.dtype, device=device)
    messages = [
        (ranges.view(-1)[one.start : one.stop], one.sender)
        for one in planned.messages
        if one.receiver == me
    ]
    with _naming(f"bucket {number}"):
        works = route.pieces.receive_all(messages, tag=number)
    return _Arrival(number, planned.bucket, ranges, works)


def _exchange(arrival: _Arrival, route: Route) -> _Arrival:
    """Wait for this rank's range, and start exchanging the ranges with the other receivers.

    The next bucket's messages are under way, in another group. NCCL demands that all receivers
    start the operations of both groups in the same order, as they do, and that both kernels find
    room on a GPU at once: a receiver's exchange waits for the others', which may have begun the
    messages first. At most 32 blocks each of the 132 multiprocessors of an H100, whose engine is
    idle, so there is room. Not yet run on a GPU.
    """
    _finish(route.pieces, arrival.works, f"bucket {arrival.number}")
    assert route.receivers is not None
    if len(arrival.ranges) > 1:
        with _naming(f"bucket {arrival.number}"):
            arrival.works = route.receivers.all_gather(arrival.ranges)
    return arrival


def _begin(exported: Exported, route: Route) -> int:
    """Compare what all ranks expect; returns the number of receivers. Collective over all ranks."""
    number = _fingerprint(exported, route.bucket_bytes)
    both = torch.tensor([number, -number], device=route.pieces.device)
    # With NCCL this also makes the communicators, which their ranks must do together.
    for group in (route.pieces, route.receivers):
        if group is not None:
            _finish(group, [group.maximum(both)], "the beginning")
    largest, negative_of_smallest = both.tolist()
    if largest != -negative_of_smallest:
        raise WeightSyncError(
            "weights: the ranks of this job do not expect the same parameters: they have different "
            "configs or models"
        )
    return route.pieces.size - exported.num_ranks


def _fingerprint(exported: Exported, bucket_bytes: int) -> int:
    """56 bits that differ if two ranks would cut, place or name a parameter differently."""
    names = [field.name for field in fields(Rule) if field.name not in ("join", "part")]
    facts = [[getattr(rule, name) for name in names] for rule in exported.rules if not rule.tied]
    layers = [[[*stage] for stage in stages] for stages in exported.layers]
    sizes = (exported.tp_size, exported.ep_size, exported.num_ranks, bucket_bytes)
    digest = hashlib.sha256(repr([facts, layers, sizes, exported.dtype]).encode()).digest()
    return int.from_bytes(digest[:7])


def _end(route: Route) -> None:
    """Wait until all ranks have everything. Collective."""
    _finish(route.texts, [route.texts.maximum(torch.zeros(1))], "the end")


def _ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield items, each once the next one has been made; keeps no reference to what it yielded."""
    made: deque[T] = deque()
    for item in items:
        made.append(item)
        del item
        if len(made) == 2:
            yield made.popleft()
    while made:
        yield made.popleft()


def _finish(group: OutsideGroup | None, works: list[dist.Work], what: str) -> None:
    """Wait until these operations of a group are complete, and clear the list."""
    assert group is not None
    with _naming(what):
        group.finish(works)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn errors of the groups into a WeightSyncError that names the transfer."""
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(
            f"weights, {what}: a rank of the other side is gone or does not respond: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
