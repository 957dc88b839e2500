"""Without a launcher that ends the ranks: all notice at once that a rank has died."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from gapo_megatron.compat.torch_groups import OutsideGroup
from gapo_megatron.errors import MachineError
from gapo_megatron.run.fail_fast import WATCH_THREAD, fail_fast

_TAG = 2**31 - 1
"""Tag of the messages here; those of `exchange` use the numbers of orders."""
_LEAVES = -1
"""Sent instead of the rank that is gone: the sender leaves normally."""
_ALWAYS = timedelta(days=1000)
_NOTICE_TIMEOUT = timedelta(seconds=1)
"""Longest time to send the notice that a rank is gone; the receiver may be frozen."""


class Presence:
    """Each rank watches the next one, around the ring of all ranks of a job.

    It waits for the next rank's only message. If that rank exits first, in any way, the operating
    system closes its connections, which ends the wait. Then this rank tells its own watcher which
    rank is gone, and ends with an error that names it. Each rank watches a single other, and no
    messages are sent until a rank leaves.

    A machine that loses power or its network closes no connections: then the watch of
    `run.attempt.Attempt` ends the other ranks.
    """

    def __init__(self, group: OutsideGroup, *, num_training: int) -> None:
        """Begin to watch, in a thread. No collective, but every rank of the group must do it.

        Args:
            group: gloo group of all ranks of the job: those that train, then those that generate.
            num_training: number of ranks that train.
        """
        self._group, self._num_training = group, num_training
        self._watched = (group.rank + 1) % group.size
        self._gone = torch.empty(1, dtype=torch.int64)
        self._message = group.receive(self._gone, source=self._watched, tag=_TAG)
        self._has_left = False
        self._thread = threading.Thread(target=self._watch, name=WATCH_THREAD, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Leave the ring; call it after a barrier, when all its ranks leave. Collective."""
        self._has_left = True
        self._tell(_LEAVES).wait()
        self._thread.join()

    def _watch(self) -> None:
        with fail_fast():
            try:
                self._message.wait(_ALWAYS)
                gone = int(self._gone)
            except RuntimeError as error:
                if "imed out" in str(error):
                    return  # another thread's operation failed, and reports it itself
                gone = self._watched
            if gone == _LEAVES or self._has_left:
                return
            with contextlib.suppress(RuntimeError):  # the receiver may be gone too
                self._tell(gone).wait(_NOTICE_TIMEOUT)
            raise MachineError(
                f"rank {gone} of the job, {self._name(gone)}, is gone: its connection closed. Its "
                "own output says why, unless it was killed"
            )

    def _tell(self, gone: int) -> dist.Work:
        """Start sending to the rank that watches this one."""
        self._sent = torch.tensor([gone])
        watcher = (self._group.rank - 1) % self._group.size
        return self._group.send(self._sent, to=watcher, tag=_TAG)

    def _name(self, rank: int) -> str:
        num_training = self._num_training
        side = "training" if rank < num_training else "generation"
        return f"rank {rank if rank < num_training else rank - num_training} of {side}"
