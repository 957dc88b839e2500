"""All ranks notice at once that one has ended without leaving, where no launcher ends them."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from gapo_megatron.compat.torch import OutsideGroup
from gapo_megatron.errors import MachineError
from gapo_megatron.run.fail_fast import WATCH_THREAD, fail_fast

_TAG = 2**31 - 1
"""Of the messages here; those of `exchange` have the numbers of orders."""
_LEAVES = -1
"""In place of a rank that is gone: the sender leaves as it should."""
_ALWAYS = timedelta(days=1000)
_NOTICE_TIMEOUT = timedelta(seconds=1)
"""Longest time to send the notice that a rank is gone; its receiver may be frozen."""


class Presence:
    """Each rank watches the next one, around the ring of all ranks of a job.

    It waits for the next one's only message. If that rank ends first, however it ends, the system
    closes its connections, which ends the wait. Then this rank tells the one that watches it who is
    gone, and ends with an error that says so. No rank has more than one to watch, and nothing is
    sent meanwhile.

    A machine that loses power or its network closes no connections: the watch of
    `run.attempt.Attempt` ends the others there.
    """

    def __init__(self, group: OutsideGroup, *, num_training: int) -> None:
        """Begin to watch, in a thread. No collective, but every rank of the group does it.

        Args:
            group: gloo, of all ranks of the job: those that train, then those that generate.
            num_training: how many of them train.
        """
        self._group, self._num_training = group, num_training
        self._watched = (group.rank + 1) % group.size
        self._gone = torch.empty(1, dtype=torch.int64)
        self._message = group.receive(self._gone, source=self._watched, tag=_TAG)
        self._has_left = False
        self._thread = threading.Thread(target=self._watch, name=WATCH_THREAD, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Leave the ring when all ranks of it are about to: behind a barrier. Collective."""
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
                    return  # an operation of another thread, which says so itself
                gone = self._watched
            if gone == _LEAVES or self._has_left:
                return
            with contextlib.suppress(RuntimeError):  # nobody is there to hear it
                self._tell(gone).wait(_NOTICE_TIMEOUT)
            raise MachineError(
                f"rank {gone} of the job, {self._name(gone)}, is gone: its connection closed; its "
                "own output says why, unless it was killed"
            )

    def _tell(self, gone: int) -> dist.Work:
        """Begin to send to the rank that watches this one."""
        self._sent = torch.tensor([gone])
        watcher = (self._group.rank - 1) % self._group.size
        return self._group.send(self._sent, to=watcher, tag=_TAG)

    def _name(self, rank: int) -> str:
        num_training = self._num_training
        side = "training" if rank < num_training else "generation"
        return f"rank {rank if rank < num_training else rank - num_training} of {side}"
