"""Process groups of torch that are built directly."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NCCL_GRACE = timedelta(minutes=1)
"""Margin of NCCL's own timeout, which ends the process, over the timeout of `finish`."""
_LOOK_EVERY_S = 1e-4
_ABORT_TAG = 2**31 - 2
"""Tag of a message that nobody sends."""
_AT_ONCE = timedelta(milliseconds=1)


def abort_gloo(group: Any, *, rank: int, size: int) -> None:
    """End all operations of a gloo group on this rank with an error; call it from any thread.

    `abort` and `shutdown` of gloo's groups leave their connections open. But gloo closes all
    connections of a group when one of its operations times out, as a message that nobody sends
    does. A receipt from a rank that is gone fails without that: the next rank is tried.

    Args:
        group: gloo group, inside or outside the default process group. It is of no use afterwards.
        rank: rank of this process in the group.
        size: number of its ranks.
    """
    # Uses: recv of ProcessGroup and ProcessGroupGloo; the message of a time-out; its effect on
    #     gloo's other operations (transport/tcp/unbound_buffer.cc, Context::signalException)
    # Versions: torch 2.13.0
    # Upstream: none found
    for other in range(size):
        if other == rank:
            continue
        try:
            group.recv([torch.empty(1)], other, _ABORT_TAG).wait(_AT_ONCE)
        except RuntimeError as error:
            if "imed out" in str(error):
                return


def side_group(ranks: Sequence[int], *, timeout_s: float, connect_s: float) -> dist.ProcessGroup:
    """A gloo group of some ranks of the default group; the others may be gone.

    Args:
        ranks: ranks of the default group; each calls this.
        timeout_s: timeout of every operation.
        connect_s: timeout of the connections.

    Collectives: creation of a group, by these ranks alone.
    """
    # Uses: _set_pg_timeout of distributed_c10d
    # Versions: torch 2.13.0
    # Upstream: none found
    group = dist.new_group(
        ranks,
        backend="gloo",
        timeout=timedelta(seconds=connect_s),
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return group


def own_connection(store: dist.Store) -> dist.Store:
    """The same store over another connection, for a thread that must not wait for others.

    A wait for a key, as of ranks that connect, keeps all other threads from a connection.
    """
    # Uses: Store.clone, which the stub lacks; activeOpLock_ of TCPStore
    # Versions: torch 2.13.0
    # Upstream: none found
    other: dist.Store = store.clone()  # type: ignore[attr-defined]
    return other


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Make NCCL groups whose watchdog does not end the process when a rank is gone.

    Its default, 3, does (`SHOULD_TEAR_DOWN`); `OutsideGroup.finish` notices errors itself.
    """
    # Uses: TORCH_NCCL_ASYNC_ERROR_HANDLING, which the constructor of ProcessGroupNCCL reads
    # Versions: torch 2.13.0 (its source; not run)
    # Upstream: none found
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class OutsideGroup:
    """A process group independent of the default group, e.g. between ranks of several worlds.

    It is not registered with `torch.distributed`, so its ranks need not share anything else.
    """

    _is_aborted = False

    # Uses: ProcessGroupGloo, ProcessGroupNCCL and its Options, built directly; their broadcast,
    #     allreduce, _allgather_base, send, recv, _start_coalescing, _end_coalescing, barrier,
    #     shutdown, _set_default_timeout, abort (NCCL); is_completed of their works
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#151960 (open: groups without a world), #31036 (open: the
    #     constructors are private on purpose)
    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        connect_s: float | None = None,
    ) -> None:
        """Connect to the other ranks: with gloo at once, with NCCL at the first operation.

        Args:
            store: used by this group only (a `PrefixStore`).
            rank: rank of this process in the group.
            size: number of ranks.
            device: device of the tensors; selects NCCL on a GPU, otherwise gloo.
            timeout_s: timeout of every operation.
            connect_s: timeout of gloo's connections; None: `timeout_s`.
        """
        self.rank, self.size, self.device, self.timeout_s = rank, size, device, timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout + _NCCL_GRACE
            with _errors_left_to_us():
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            connect = timedelta(seconds=connect_s or timeout_s)
            self._group = dist.ProcessGroupGloo(store, rank, size, connect)
            self._group._set_default_timeout(timeout)

    def all_gather(self, whole: Tensor) -> list[dist.Work]:
        """Start filling every rank's row on all ranks; completes with `Work.wait`.

        Args:
            whole: [ranks, n], contiguous; this rank's row is filled.
        """
        if self.device.type == "cuda":
            return [self._group._allgather_base(whole.view(-1), whole[self.rank])]
        # Gloo's own gathers into other memory and copies: ten times as slow.
        return [self.broadcast(row, source=rank) for rank, row in enumerate(whole)]

    def maximum(self, tensor: Tensor) -> dist.Work:
        """Start replacing the elements of `tensor` by their maxima over all ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        work: dist.Work = self._group.allreduce([tensor], options)
        return work

    def send_all(self, messages: Sequence[tuple[Tensor, int]], *, tag: int) -> list[dist.Work]:
        """Start sending each tensor to its rank, at once; see `send`."""
        with self._together() as works:
            works += [self.send(tensor, to=rank, tag=tag) for tensor, rank in messages]
        return works

    def receive_all(self, messages: Sequence[tuple[Tensor, int]], *, tag: int) -> list[dist.Work]:
        """Start receiving each tensor from its rank, at once; see `receive`."""
        with self._together() as works:
            works += [self.receive(tensor, source=rank, tag=tag) for tensor, rank in messages]
        return works

    @contextlib.contextmanager
    def _together(self) -> Iterator[list[dist.Work]]:
        """Let NCCL start all messages as one operation of the communicator of all ranks.

        A message by itself would make a communicator of its two ranks.
        """
        works: list[dist.Work] = []
        if self.device.type != "cuda":
            yield works
            return
        self._group._start_coalescing()
        try:
            yield works
        finally:  # NCCL would queue all later operations of this thread, and start none
            work = self._group._end_coalescing()
        works[:] = [] if work is None else [work]  # None: there was no message

    def finish(self, works: list[dist.Work]) -> None:
        """Wait until these operations are complete, and clear the list.

        With NCCL `Work.wait` returns at once and lets the current stream wait. Here the host waits
        too: a host that runs ahead would allocate memory for everything that is queued, and would
        not notice that a rank is gone.

        Raises:
            RuntimeError: another rank is gone, or an operation takes longer than `timeout_s`.
        """
        end_s = time.monotonic() + self.timeout_s
        while works:
            work = works.pop(0)
            while self.device.type == "cuda" and not work.is_completed():
                self._require_open()
                if time.monotonic() > end_s:
                    raise RuntimeError(f"timed out after {self.timeout_s} s")
                time.sleep(_LOOK_EVERY_S)
            self._require_open()
            work.wait()

    def broadcast(self, tensor: Tensor, *, source: int) -> dist.Work:
        """Start a broadcast of `tensor` from rank `source`; completes with `Work.wait`."""
        work: dist.Work = self._group.broadcast(tensor, source)
        return work

    def send(self, tensor: Tensor, *, to: int, tag: int) -> dist.Work:
        """Start sending to rank `to`; `tensor` must not change until `Work.wait`."""
        work: dist.Work = self._group.send([tensor], to, tag)
        return work

    def receive(self, tensor: Tensor, *, source: int, tag: int) -> dist.Work:
        """Start receiving from rank `source`; `tensor` is complete after `Work.wait`."""
        work: dist.Work = self._group.recv([tensor], source, tag)
        return work

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        self._group.barrier().wait()

    def abort(self) -> None:
        """End all operations on this rank with an error; call it from any thread. No collective.

        With NCCL, whose kernels wait for a rank that is gone, `abort` ends its communicators, also
        one that is being made, without joining a thread: read in its source, not yet run. It does
        not end a blocking `ncclCommInitRank`, so the ranks make a communicator only when all of
        them are known to be there (`run.bridge.Bridge.regroup`).
        """
        self._is_aborted = True
        if self.device.type == "cuda":
            self._group.abort()
        else:
            abort_gloo(self._group, rank=self.rank, size=self.size)

    def _require_open(self) -> None:
        if self._is_aborted:
            raise RuntimeError("connection closed: a rank of the group is gone")

    def close(self) -> None:
        """Close threads and connections."""
        self._group.shutdown()
