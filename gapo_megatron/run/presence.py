"""All ranks of a job with generation ranks notice at once that one of them has died.

A generation rank that dies takes its engine's other ranks with it, and the rest go on without them
(`bridge.Bridge.regroup`). The loss of a rank that trains, or of the last engine, ends the job; so
does that of any rank before the engines are built, for all build them together, and where an engine
has several ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gapo_megatron.compat.torch_groups import OutsideGroup, own_connection
from gapo_megatron.errors import MachineError
from gapo_megatron.run.fail_fast import WATCH_THREAD, fail_fast

_TAG = 2**31 - 1
"""Tag of the messages here."""
_LEAVES = -1
"""Sent instead of the rank that is gone: the sender leaves normally."""
_ALWAYS = timedelta(days=1000)
_NOTICE_TIMEOUT = timedelta(seconds=1)
"""Longest time to send the notice that a rank is gone; the receiver may be frozen."""
_LAUNCHER_S = 30.0
"""How long a launcher has to end all ranks after one that trains has died."""
_LOOK_EVERY_S = 0.5
"""Seconds between two looks at what the other ranks have noticed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a job: those that train, then those that generate, an engine after another."""

    num_training: int
    num_generation: int
    engine_ranks: int
    """Ranks of an engine."""

    @property
    def generation(self) -> range:
        """The ranks that generate."""
        return range(self.num_training, self.num_training + self.num_generation)

    def engine_of(self, rank: int) -> range:
        """All ranks of the engine that a generation rank belongs to."""
        first = rank - (rank - self.num_training) % self.engine_ranks
        return range(first, first + self.engine_ranks)

    def name(self, rank: int) -> str:
        """A rank in words."""
        first = self.num_training
        if rank < first:
            return f"rank {rank} of the job, rank {rank} of training"
        return f"rank {rank} of the job, rank {rank - first} of generation"

    def describe_loss(self, rank: int) -> str:
        """That a rank is gone, for an error."""
        return (
            f"{self.name(rank)}, is gone: its connection closed. Its own output says why, unless "
            "it was killed"
        )


class Presence:
    """Each rank watches the next one, around the ring of all ranks of a job.

    It waits for the next rank's only message. If that rank exits first, in any way, the operating
    system closes its connections, which ends the wait. No messages are sent until a rank leaves.

    - A lost generation rank is noted in the store, where every rank looks twice a second, and its
      watcher watches the next one. A rank whose own engine has lost a rank ends, and one that
      cannot go on yet.
    - If a rank that trains is gone, its watcher tells its own watcher, and ends with an error that
      names it; so do all ranks in turn. A launcher has half a minute to end the ranks itself:
      otherwise they would exit before it has their stacks.

    A machine that loses power or its network closes no connections: then the watch of
    `run.attempt.Attempt` ends the other ranks.

    Attributes:
        may_go_on: whether this rank goes on without a generation rank that is gone. False at first
            on those that generate: a rank may be waiting for that one within a library.
    """

    def __init__(
        self,
        group: OutsideGroup,
        store: dist.Store,
        layout: Layout,
        *,
        on_lost: Callable[[frozenset[int]], object],
        has_launcher: bool,
    ) -> None:
        """Begin to watch, in two threads. No collective, but every rank must do it.

        Args:
            group: gloo group of all ranks of the job, for the sole use of this object.
            store: a `PrefixStore` for it alone; used over a connection of its own.
            layout: the ranks.
            on_lost: called in a thread with all lost ranks, whenever there are more.
            has_launcher: whether a launcher ends all ranks after one that trains has died.
        """
        self._group, self._store, self._layout = group, own_connection(store), layout
        self._on_lost, self._has_launcher = on_lost, has_launcher
        self.may_go_on = group.rank not in layout.generation
        self._watched = (group.rank + 1) % group.size
        self._lost: frozenset[int] = frozenset()
        self._num_noted = 0
        self._has_left = threading.Event()
        self._begin_to_wait()
        self._threads = [
            threading.Thread(target=target, name=WATCH_THREAD, daemon=True)
            for target in (self._watch, self._look)
        ]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Leave the ring; call it after a barrier, when all its ranks leave. Collective."""
        self._has_left.set()
        with contextlib.suppress(RuntimeError):  # the receiver has just died
            self._tell(_LEAVES).wait()
        for thread in self._threads:
            thread.join()

    # --- the ring -------------------------------------------------------------------------------

    def _begin_to_wait(self) -> None:
        self._gone = torch.empty(1, dtype=torch.int64)
        self._message: dist.Work | None = None
        with contextlib.suppress(RuntimeError):  # it is gone already
            self._message = self._group.receive(self._gone, source=self._watched, tag=_TAG)

    def _watch(self) -> None:
        with fail_fast():
            while self._watched != self._group.rank:
                gone = self._next_news()
                if gone == _LEAVES or self._has_left.is_set():
                    return
                if gone in self._layout.generation:
                    self._note(gone)
                    self._watched = (self._watched + 1) % self._group.size
                    self._begin_to_wait()
                    continue
                if self._has_launcher and self._has_left.wait(_LAUNCHER_S):
                    return
                with contextlib.suppress(RuntimeError):  # the receiver may be gone too
                    self._tell(gone).wait(_NOTICE_TIMEOUT)
                raise MachineError(self._layout.describe_loss(gone))

    def _next_news(self) -> int:
        """Wait for the watched rank's end, or its message about another rank's."""
        if self._message is None:
            return self._watched
        try:
            self._message.wait(_ALWAYS)
        except RuntimeError:
            return self._watched
        return int(self._gone)

    def _tell(self, gone: int) -> dist.Work:
        """Start sending to the rank that watches this one."""
        self._sent = torch.tensor([gone])
        watcher = (self._group.rank - 1) % self._group.size
        while watcher in self._lost:
            watcher = (watcher - 1) % self._group.size
        return self._group.send(self._sent, to=watcher, tag=_TAG)

    # --- the store ------------------------------------------------------------------------------

    def _note(self, gone: int) -> None:
        self._store.set(f"gone/{gone}", b"")  # type: ignore[arg-type]  # its stub accepts str only
        self._store.add("noted", 1)

    def _look(self) -> None:
        layout = self._layout
        with fail_fast():
            while not self._has_left.wait(_LOOK_EVERY_S):
                try:
                    gone = self._newly_gone()
                except RuntimeError:  # rank 0, which hosts the store, has left, or is gone
                    return
                lost = self._lost.union(*map(layout.engine_of, gone))
                if lost == self._lost:
                    continue
                self._lost = lost
                is_last = lost.issuperset(layout.generation)
                if self._group.rank in lost or is_last or not self.may_go_on:
                    raise MachineError(layout.describe_loss(gone[0]))
                self._on_lost(lost)

    def _newly_gone(self) -> list[int]:
        """Ranks that are noted in the store and not known to be lost here."""
        noted = self._store.add("noted", 0)
        if noted == self._num_noted:
            return []
        self._num_noted = noted
        left = [rank for rank in self._layout.generation if rank not in self._lost]
        return [rank for rank in left if self._store.check([f"gone/{rank}"])]
