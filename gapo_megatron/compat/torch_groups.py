"""Process groups of torch that are built directly."""

from __future__ import annotations

import contextlib
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


class OutsideGroup:
    """A process group independent of the default group, e.g. between ranks of several worlds.

    It is not registered with `torch.distributed`, so its ranks need not share anything else.
    """

    # Uses: ProcessGroupGloo, ProcessGroupNCCL and its Options, built directly; their broadcast,
    #     allreduce, _allgather_base, send, recv, _start_coalescing, _end_coalescing, barrier,
    #     shutdown; is_completed of their works
    # Versions: torch 2.13.0
    # Upstream: pytorch/pytorch#151960 (open: groups without a world), #31036 (open: the
    #     constructors are private on purpose)
    def __init__(
        self, store: dist.Store, *, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        """Connect to the other ranks: with gloo at once, with NCCL at the first operation.

        Args:
            store: used by this group only (a `PrefixStore`).
            rank: rank of this process in the group.
            size: number of ranks.
            device: device of the tensors; selects NCCL on a GPU, otherwise gloo.
            timeout_s: timeout of every operation.
        """
        self.rank, self.size, self.device, self.timeout_s = rank, size, device, timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout + _NCCL_GRACE
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

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
                if time.monotonic() > end_s:
                    raise RuntimeError(f"timed out after {self.timeout_s} s")
                time.sleep(_LOOK_EVERY_S)
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

    def close(self) -> None:
        """Close threads and connections."""
        self._group.shutdown()
