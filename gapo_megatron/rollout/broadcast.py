"""Broadcast weights in buckets: a bucket is packed while the previous bucket is sent.

Tensors up to the size of a bucket are packed together, and the receiver yields views of the bucket.
A larger tensor is sent alone, directly from the sender's memory to the receiver's.
An engine may hold tensors: vLLM keeps those of a fused module (query, key and value; gate and up;
all experts of a layer) until the last of them has arrived. So every bucket is received into new
memory, which is freed when none of its tensors is referenced. Memory beside the weights:

- sender: two buckets;
- receiver: tensors held by the engine, in whole buckets, plus a bucket being received and a bucket
  being yielded; a tensor that is sent alone counts as a bucket.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.compat.torch import OutsideGroup
from gapo_megatron.errors import WeightSyncError

BUCKET_BYTES = {"cuda": 2**28, "cpu": 2**25}
"""Bytes of a bucket, by device type."""
_ALIGNMENT = 256
"""Alignment of tensors in a bucket, in bytes: a cache line, more than any element."""
_SOURCE = 0


@dataclass(slots=True)
class Route:
    """Two groups of the same ranks; rank 0 sends.

    With two, the header of a bucket can arrive while the previous bucket is still being sent.
    """

    headers: OutsideGroup
    """Gloo group for headers of buckets, errors and the final confirmation."""
    payload: OutsideGroup
    """Group for the bytes of weights; NCCL on GPUs."""


_Kind = Literal["bucket", "end", "error"]


@dataclass(slots=True)
class _Header:
    """What travels next."""

    kind: _Kind
    number: int
    """Headers before this one in the broadcast, counted on both ends."""
    num_bytes: int = 0
    """Bytes sent, with the padding between tensors."""
    tensors: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    """(name, dtype, shape, offset in bytes) of each tensor."""
    error: str = ""
    """Why the sender aborts."""


def send(
    weights: Iterable[tuple[str, Tensor]], route: Route, *, bucket_bytes: int | None = None
) -> int:
    """Send tensors to the other ranks of a route. Call it on its rank 0.

    Args:
        weights: (name, tensor) of any dtypes, on the device of the payload; a tensor may be
            overwritten once the next is requested.
        route: the groups to send over.
        bucket_bytes: bytes of a bucket; None: BUCKET_BYTES of the device.

    Returns:
        Bytes of all tensors. By then every receiver has received all of them.

    Collectives: those of `weights`; per bucket two broadcasts in `headers` and one in `payload`;
    at the end a barrier in `headers`.

    Raises:
        WeightSyncError: a receiver does not take part within the groups' time limit.
        Exception: whatever `weights` raises; the receivers get its text as a WeightSyncError.
    """
    sender = _Sender(route, bucket_bytes or BUCKET_BYTES[route.payload.device.type])
    try:
        for name, tensor in weights:
            sender.add(name, tensor.detach())
        sender.finish()
    except WeightSyncError:
        raise  # a receiver is gone: the groups can no longer be used
    except BaseException as error:
        # The receivers raise it too, instead of waiting until their timeout.
        with suppress(WeightSyncError):
            sender.end("error", error=f"{type(error).__name__}: {error}")
        raise
    return sender.num_bytes


def receive(route: Route) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs of `send`, bitwise identical and in the same order.

    Call it on every rank of a route but the first, and consume it completely: the sender waits for
    that. A receiver may hold a tensor for any time; this keeps its whole bucket alive.

    Args:
        route: the groups to receive over.

    Collectives: those of `send`.

    Raises:
        WeightSyncError: the sender aborted (names its error), does not take part within the
            groups' time limit, or is at another header. The tensors yielded so far are then not the
            weights of any version.
    """
    return _Receiver(route).tensors()


class _Sender:
    """Two buckets: one is filled while the other is sent."""

    def __init__(self, route: Route, bucket_bytes: int) -> None:
        self.num_bytes = 0
        self._route = route
        self._capacity = -(-bucket_bytes // _ALIGNMENT) * _ALIGNMENT
        self._buckets = [_new_memory(route, self._capacity) for _ in range(2)]
        self._works: list[list[dist.Work]] = [[], []]
        self._filling = 0
        self._used = 0
        self._tensors: list[tuple[str, str, list[int], int]] = []
        self._num_headers = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Pack a tensor, or send it alone if it is larger than a bucket."""
        num_bytes = tensor.numel() * tensor.element_size()
        self.num_bytes += num_bytes
        entry = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        if num_bytes > self._capacity:
            self._flush()
            works = self._announce("bucket", num_bytes=num_bytes, tensors=[(*entry, 0)])
            content = _as_bytes(tensor.contiguous())
            works.append(self._route.payload.broadcast(content, source=_SOURCE))
            _wait(works, name)
            return
        if self._used + num_bytes > self._capacity:
            self._flush()
        if not self._tensors:
            _wait(self._works[self._filling], f"the bucket before header {self._num_headers}")
        room = self._buckets[self._filling][self._used : self._used + num_bytes]
        room.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._tensors.append((*entry, self._used))
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def finish(self) -> None:
        """Send the rest, and wait until every receiver has everything."""
        self._flush()
        self.end("end")
        _synchronize(self._route.payload.device)
        with _naming("the end"):
            self._route.headers.barrier()

    def end(self, kind: Literal["end", "error"], **fields: Any) -> None:
        """Announce the end or an error to all receivers; wait for pending sends."""
        last = self._announce(kind, **fields)
        for works in (*self._works, last):
            _wait(works, f"bytes before header {self._num_headers}")

    def _announce(self, kind: _Kind, **fields: Any) -> list[dist.Work]:
        """Start broadcasting a header to all receivers."""
        header = _Header(kind, self._num_headers, **fields)
        self._num_headers += 1
        content = json.dumps([getattr(header, name) for name in header.__slots__]).encode()
        body = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with _naming(f"header {header.number}"):
            return [
                self._route.headers.broadcast(tensor, source=_SOURCE)
                for tensor in (torch.tensor([len(content)]), body)
            ]

    def _flush(self) -> None:
        """Start sending the bucket that was being filled, unless it is empty."""
        if not self._tensors:
            return
        # It may start before the previous bucket has arrived; it then waits for the receivers.
        works = self._announce("bucket", num_bytes=self._used, tensors=self._tensors)
        bucket = self._buckets[self._filling][: self._used]
        works.append(self._route.payload.broadcast(bucket, source=_SOURCE))
        self._works[self._filling] = works
        self._filling = 1 - self._filling
        self._used, self._tensors = 0, []


class _Receiver:
    """Receives the next bucket while the previous bucket is yielded."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._num_headers = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `receive`."""
        ready: list[tuple[str, Tensor]] = []
        works: list[dist.Work] = []
        while True:
            # Read before the previous bucket has arrived, so that the next can start without delay.
            header = self._next_header()
            _wait(works, f"bytes before header {header.number}")
            if header.kind == "error":
                raise WeightSyncError(f"weights: the sender aborted: {header.error}")
            if header.kind == "end":
                self._confirm()
                yield from _handed_out(ready)
                return
            memory = _new_memory(self._route, header.num_bytes)
            works = [self._route.payload.broadcast(memory, source=_SOURCE)]
            yield from _handed_out(ready)  # while the next bucket arrives
            ready = _views(memory, header)
            del memory

    def _next_header(self) -> _Header:
        """Receive the next header and check its number."""
        with _naming(f"header {self._num_headers}"):
            length = torch.zeros(1, dtype=torch.int64)
            self._route.headers.broadcast(length, source=_SOURCE).wait()
            body = torch.empty(int(length), dtype=torch.uint8)
            self._route.headers.broadcast(body, source=_SOURCE).wait()
        header = _Header(*json.loads(body.numpy().tobytes()))
        if header.number != self._num_headers:
            raise WeightSyncError(
                f"weights: received header {header.number}, expected {self._num_headers}: sender "
                "and receiver are not in the same broadcast"
            )
        self._num_headers += 1
        return header

    def _confirm(self) -> None:
        """Confirm to the sender that everything has arrived."""
        _synchronize(self._route.payload.device)
        with _naming("the end"):
            self._route.headers.barrier()


def _new_memory(route: Route, num_bytes: int) -> Tensor:
    """[num_bytes] uint8 on the payload's device, freed with the last view of it."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=route.payload.device)


def _handed_out(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in order, without keeping references to yielded ones."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def _views(memory: Tensor, header: _Header) -> list[tuple[str, Tensor]]:
    views = []
    for name, dtype_name, shape, offset in header.tensors:
        dtype = getattr(torch, dtype_name)
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        views.append((name, memory[offset : offset + num_bytes].view(dtype).view(shape)))
    return views


def _wait(works: list[dist.Work], what: str) -> None:
    """Wait for all works and clear the list."""
    with _naming(what):
        while works:
            works.pop(0).wait()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _synchronize(device: torch.device) -> None:
    """Wait for the device: NCCL operations are only queued so far."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _naming:
    """Turns errors of a collective into a WeightSyncError that names the transfer."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, WeightSyncError):
            raise WeightSyncError(
                f"weights, {self._what}: a rank of the other side is gone or does not respond: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
