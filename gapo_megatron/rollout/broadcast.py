"""Weights in buckets, from one rank to others: packed while the bucket before travels.

A tensor that is no larger than a bucket travels in one, with others, and the receiver hands out
views of it. A larger one travels by itself, from the sender's memory straight to the receiver's.
An engine may hold what it is given: vLLM keeps the tensors of a fused module (query, key and value;
gate and up; all experts of a layer) until the last of them has come. So every bucket arrives in
memory of its own, which is freed when none of its tensors is referenced. Memory beside the weights:

- sender: two buckets;
- receiver: what the engine holds, in whole buckets, and the two that arrive and are handed out; a
  tensor that travels by itself counts as a bucket.
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
"""Bytes between which tensors of a bucket begin: more than any element, and a cache line."""
_SOURCE = 0


@dataclass(slots=True)
class Route:
    """Two groups of the same ranks, of which rank 0 sends.

    Two, so that what a bucket holds is known before the bucket before has travelled.
    """

    headers: OutsideGroup
    """Gloo: what a bucket holds, errors, and that all has arrived."""
    payload: OutsideGroup
    """Bytes of the weights; NCCL on GPUs."""


_Kind = Literal["bucket", "end", "error"]


@dataclass(slots=True)
class _Header:
    """What travels next."""

    kind: _Kind
    number: int
    """Headers before this one in the broadcast: both ends count."""
    num_bytes: int = 0
    """Bytes that travel, with the padding between tensors."""
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
            overwritten once the next one is asked for.
        route: the groups that they travel over.
        bucket_bytes: bytes of a bucket; None: BUCKET_BYTES of the device.

    Returns:
        Bytes of all tensors. By then every receiver has all of them, and hands out the last ones.

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
        raise  # a receiver is gone: the groups are of no more use
    except BaseException as error:
        # The receivers raise it too, instead of waiting for what never comes.
        with suppress(WeightSyncError):
            sender.end("error", error=f"{type(error).__name__}: {error}")
        raise
    return sender.num_bytes


def receive(route: Route) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) that `send` is given, bit for bit and in its order.

    Call it on every rank of a route but the first, and run it through to its end: the sender waits
    for that. A receiver may hold a tensor as long as it likes; this keeps its bucket alive.

    Args:
        route: the groups that they travel over.

    Collectives: those of `send`.

    Raises:
        WeightSyncError: the sender aborted (names its error), does not take part within the
            groups' time limit, or is at another place of another broadcast. The tensors so far are
            no weights of any version.
    """
    return _Receiver(route).tensors()


class _Sender:
    """Two buckets: one is filled while the other travels."""

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
        """Pack a tensor, or send it by itself if it is larger than a bucket."""
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
            _wait(self._works[self._filling], f"a bucket before header {self._num_headers}")
        room = self._buckets[self._filling][self._used : self._used + num_bytes]
        room.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._tensors.append((*entry, self._used))
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def finish(self) -> None:
        """Send what is left, and wait until every receiver has all."""
        self._flush()
        self.end("end")
        _synchronize(self._route.payload.device)
        with _naming("the end"):
            self._route.headers.barrier()

    def end(self, kind: Literal["end", "error"], **fields: Any) -> None:
        """Tell all receivers that nothing comes any more; wait for what is on its way."""
        last = self._announce(kind, **fields)
        for works in (*self._works, last):
            _wait(works, f"what came before header {self._num_headers}")

    def _announce(self, kind: _Kind, **fields: Any) -> list[dist.Work]:
        """Begin to tell all receivers what comes next."""
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
        """Begin to send the bucket that was being filled, if it has anything."""
        if not self._tensors:
            return
        # It may set out before the one before has arrived; it then waits for the receivers' room.
        works = self._announce("bucket", num_bytes=self._used, tensors=self._tensors)
        bucket = self._buckets[self._filling][: self._used]
        works.append(self._route.payload.broadcast(bucket, source=_SOURCE))
        self._works[self._filling] = works
        self._filling = 1 - self._filling
        self._used, self._tensors = 0, []


class _Receiver:
    """Takes the next bucket while the one before is handed out."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._num_headers = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `receive`."""
        ready: list[tuple[str, Tensor]] = []
        works: list[dist.Work] = []
        while True:
            # Before what it announced last has arrived, so that the next one need not wait for it.
            header = self._next_header()
            _wait(works, f"what came before header {header.number}")
            if header.kind == "error":
                raise WeightSyncError(f"weights: the sender aborted: {header.error}")
            if header.kind == "end":
                self._confirm()
                yield from _handed_out(ready)
                return
            memory = _new_memory(self._route, header.num_bytes)
            works = [self._route.payload.broadcast(memory, source=_SOURCE)]
            yield from _handed_out(ready)  # while the next ones travel
            ready = _views(memory, header)
            del memory

    def _next_header(self) -> _Header:
        """What comes next."""
        with _naming(f"header {self._num_headers}"):
            length = torch.zeros(1, dtype=torch.int64)
            self._route.headers.broadcast(length, source=_SOURCE).wait()
            body = torch.empty(int(length), dtype=torch.uint8)
            self._route.headers.broadcast(body, source=_SOURCE).wait()
        header = _Header(*json.loads(body.numpy().tobytes()))
        if header.number != self._num_headers:
            raise WeightSyncError(
                f"weights: header {header.number} came where {self._num_headers} was due: sender "
                "and receiver are not at the same broadcast"
            )
        self._num_headers += 1
        return header

    def _confirm(self) -> None:
        """Tell the sender that all has arrived."""
        _synchronize(self._route.payload.device)
        with _naming("the end"):
            self._route.headers.barrier()


def _new_memory(route: Route, num_bytes: int) -> Tensor:
    """[num_bytes] uint8 on the payload's device, freed with the last view of it."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=route.payload.device)


def _handed_out(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield them in order, and hold none that has been taken."""
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
    """Wait for all of them, each once."""
    with _naming(what):
        while works:
            works.pop(0).wait()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _synchronize(device: torch.device) -> None:
    """Until here, NCCL has only queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _naming:
    """Errors of a collective become a WeightSyncError that says what was on its way."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, WeightSyncError):
            raise WeightSyncError(
                f"weights, {self._what}: a rank of the other side is gone or does not answer: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
