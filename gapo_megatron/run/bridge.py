"""The bridge between the ranks that train and the ranks that only generate.

Each side has its own default process group and reaches the other side's ranks only through this
file. The bridge only transports; `generation_ranks.py` and `generation_side.py` decide.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.compat.torch_groups import OutsideGroup, abort_gloo, side_group
from gapo_megatron.errors import MachineError
from gapo_megatron.models.rules import Place, Rule
from gapo_megatron.policy.export import Exported
from gapo_megatron.rollout import transfer
from gapo_megatron.rollout.transfer import TRANSFER_BYTES, Route
from gapo_megatron.run.fail_fast import is_lost_peer
from gapo_megatron.run.mailbox import Mailbox
from gapo_megatron.run.orders import pack, unpack
from gapo_megatron.run.presence import Layout, Presence

T = TypeVar("T")

_BEAT_EVERY_S = 0.1
"""Shortest time between two beats that are posted."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.25
"""Bounds of the polling interval: a twentieth of the time waited, longer with many ranks."""
_NOTICED_WITHIN_S = 5.0
"""How long after a lost connection the loss of a rank must be noticed (`Presence`)."""
_CONNECT_S = 30.0
"""Longest time to connect the ranks that are left; all are known to wait for it."""


class LostRanksError(MachineError):
    """Generation ranks are gone; what was under way with them begins again (`Bridge.regroup`)."""


class Bridge:
    """One rank's end of the bridge.

    Job ranks 0 to T - 1 train; the G ranks after them only generate.

    It has three channels: a mailbox in the job's rendezvous store, for orders and answers;
    `messages`, for tokens from rank to rank; and one for weights, from every trainer to the ranks
    that generate (`rollout.transfer`).

    **A frozen rank is noticed by the other side.** A rank's watch (`run.attempt.Attempt`) ends the
    process unless it is restarted in time. Waiting for the other side is not progress, so:

    - `wait` restarts the watch only when the first rank of the other side has sent a beat since.
      That rank sends beats where it makes progress (`Attempt.alive`), never while it waits: if both
      sides wait for each other, both are silent, and their watches end them.
    - A side's first rank stands for all: it takes part in their collectives, so if one of them is
      frozen, the first rank stops too, and so do its beats.
    - The mailbox is in the memory of job rank 0 (or of torchrun). If that process is frozen, the
      mailbox's methods and `beat` do not return; the watch, outside Python, ends this process.
    - The groups' operations time out after `parallel.timeout_s`; the watch is shorter.

    **The others go on without a generation rank that has died.** Every rank learns of it
    (`Presence`), and a thread ends all operations of the groups that it was in. So whatever a rank
    does with the others fails within a second or two; it then calls `regroup`.

    Attributes:
        mail: the mailbox.
        num_training: ranks that train, T.
        num_generation: ranks that only generate, without those that are lost.
        is_generation: whether this rank only generates.
        messages: gloo group of all ranks of the job, for buffers in host memory; those that are
            left keep their order.
    """

    def __init__(
        self,
        store: dist.Store,
        layout: Layout,
        *,
        rank: int,
        device: torch.device,
        timeout_s: float,
        has_launcher: bool,
    ) -> None:
        """Join the two sides.

        Args:
            store: the store that all ranks of the job use.
            layout: the ranks of the job.
            rank: this process's rank in the job.
            device: where this rank holds weights.
            timeout_s: longest that an operation of the groups may wait.
            has_launcher: see `Presence`.

        Collectives: creation of four groups: three times all ranks of the job; the ranks that
        generate.
        """
        self.num_training = layout.num_training
        self.is_generation = rank >= layout.num_training
        self.mail = Mailbox(dist.PrefixStore("gapo_megatron_mail", store))
        self._beats = dist.PrefixStore("gapo_megatron_beats", store)
        self._store, self._layout = store, layout
        self._rank, self._device, self._timeout_s = rank, device, timeout_s
        self._next_beat_s = 0.0
        self._lock = threading.Lock()
        """Held while groups are replaced, or ended for a lost rank."""
        self._lost: frozenset[int] = frozenset()
        self._own_group: dist.ProcessGroup | None = None
        self._epoch = 0
        self._connect([*layout.generation], connect_s=timeout_s)
        self._presence: Presence | None = Presence(
            self._group("presence", torch.device("cpu"), connect_s=timeout_s),
            dist.PrefixStore("gapo_megatron_presence", store),
            layout,
            on_lost=self._break,
            has_launcher=has_launcher,
        )

    @property
    def num_generation(self) -> int:
        return len(self._members)

    @property
    def num_lost(self) -> int:
        """Generation ranks of the job that the others go on without."""
        return self._layout.num_generation - len(self._members)

    def describe_lost(self) -> str:
        """The generation ranks of the job that the others go on without, in words."""
        lost = [rank for rank in self._layout.generation if rank not in self._members]
        return "; ".join(map(self._layout.describe_loss, lost))

    # --- progress ---------------------------------------------------------------------------------

    def beat(self) -> None:
        """Report progress to the other side. Never waits; must not be called while waiting.

        Only the first rank of a side posts; on the others this does nothing.
        """
        now = time.monotonic()
        if self._is_first and now >= self._next_beat_s:
            self._next_beat_s = now + _BEAT_EVERY_S
            self._beats.add(str(self.is_generation), 1)

    def beats_seen(self) -> int:
        """Beats of the other side's first rank since the start."""
        return self._beats.add(str(not self.is_generation), 0)

    def wait(self, find: Callable[[], T | None], *, alive: Callable[[], object]) -> T:
        """Poll `find` until it returns a value, while the other side makes progress.

        Args:
            find: for instance `mail.look`, without restarting the watch; returns None for "not
                yet".
            alive: `Attempt.restart_watch`, which sends no beat; called at the beginning, and
                whenever the other side has sent a beat. Without beats the watch runs out.

        Raises:
            LostRanksError: generation ranks are gone, and `find` has found nothing.
        """

        def find_or_end() -> T | None:
            found = find()
            if found is None:
                self.require_whole()
            return found

        return self._poll(find_or_end, alive)

    def _poll(self, find: Callable[[], T | None], alive: Callable[[], object]) -> T:
        alive()
        start_s, beats = time.monotonic(), self.beats_seen()
        # All ranks may wait at once, and a single store answers them.
        shortest_s = _SHORTEST_LOOK_S * max(1, (self.num_training + self.num_generation) // 8)
        while (found := find()) is None:
            waited_s = time.monotonic() - start_s
            time.sleep(max(min(waited_s / 20, _LONGEST_LOOK_S), shortest_s))
            if (seen := self.beats_seen()) != beats:
                beats = seen
                alive()
        return found

    # --- weights ---------------------------------------------------------------------------------

    def send_shards(self, exported: Exported, shard_of: Callable[[str], Tensor]) -> None:
        """Send the trainers' shards of parameters to every rank that generates. On every trainer.

        Waits for the receivers, at most `parallel.timeout_s`. Arguments, collectives and errors:
        see `transfer.send`.
        """
        transfer.send(exported, shard_of, self._route)

    def receive_whole(self, exported: Exported) -> Iterator[tuple[Rule, Place, Tensor]]:
        """Yield the whole parameters that the trainers send. On every rank that generates.

        Consume it completely. Argument, collectives and errors: see `transfer.receive`.
        """
        return transfer.receive(exported, self._route)

    # --- ranks that are gone ---------------------------------------------------------------------

    def may_go_on(self) -> None:
        """From here on this rank goes on without generation ranks that die: its engine is built."""
        if self._presence is not None:
            self._presence.may_go_on = True

    def break_too(self, group: dist.ProcessGroup) -> None:
        """Also end the operations of this gloo group of this rank's side once a rank is gone."""
        with self._lock:
            self._own_group = group

    def require_whole(self) -> None:
        """Raise LostRanksError if a generation rank that takes part is gone. No collective."""
        if gone := sorted(self._lost.intersection(self._members)):
            raise LostRanksError("; ".join(map(self._layout.describe_loss, gone)))

    def require_lost(self, error: Exception) -> LostRanksError:
        """The loss of ranks that has caused an error, perhaps noticed only now.

        It keeps neither the error nor its frames, with their groups and buffers of weights.

        Args:
            error: raised by an operation with other ranks.

        Raises:
            Exception: `error` itself, if no rank that takes part is gone.
        """
        if isinstance(error, LostRanksError):
            return LostRanksError(*error.args)
        end_s = time.monotonic()
        cause: BaseException | None = error
        while cause is not None:  # each layer may have named it
            if is_lost_peer(cause):
                end_s = time.monotonic() + _NOTICED_WITHIN_S
            cause = cause.__cause__
        while True:
            try:
                self.require_whole()
            except LostRanksError as lost:
                return LostRanksError(*lost.args)
            if time.monotonic() >= end_s:
                raise error
            time.sleep(_SHORTEST_LOOK_S)

    def regroup(self, *, alive: Callable[[], object], num_orders: int = 0) -> int:
        """Make the groups anew without the ranks that are gone. On every rank that is left.

        Waits until all of these have come here; rank 0 says who they are. What was under way in the
        former groups is lost.

        Args:
            alive: as of `wait`.
            num_orders: on rank 0, how many orders there have been.

        Returns:
            `num_orders` of rank 0: the number of the next order.

        Collectives: those of the beginning, but for the one of `Presence`.

        Raises:
            RuntimeError: they do not connect. If one more is gone since (`require_lost`), all call
                this again; some may have connected before.
        """
        self._epoch += 1
        name = f"members/{self._epoch}"
        self.mail.post(f"here/{self._epoch}/{self._rank}", b"")
        if self._rank == 0:
            ranks = self._poll(self._all_here, alive)
            self.mail.post(name, pack([ranks, num_orders]))
        ranks, num_orders = unpack(self._poll(lambda: self.mail.look(name), alive))
        self._connect(ranks, connect_s=_CONNECT_S)
        return int(num_orders)

    def _all_here(self) -> list[int] | None:
        """The generation ranks that are left, once they and all trainers wait in `regroup`."""
        left = [rank for rank in self._layout.generation if rank not in self._lost]
        here = f"here/{self._epoch}"
        is_here = (
            self.mail.look(f"{here}/{rank}") is not None
            for rank in (*range(self.num_training), *left)
        )
        return left if all(is_here) else None

    def side_group(self) -> dist.ProcessGroup:
        """A gloo group of the generation ranks that are left. Collective over these."""
        ranks = [rank - self.num_training for rank in self._members]
        group = side_group(ranks, timeout_s=self._timeout_s, connect_s=_CONNECT_S)
        self.break_too(group)
        return group

    @property
    def place(self) -> int:
        """This rank's number among the generation ranks that are left."""
        return self._members.index(self._rank)

    def _connect(self, members: list[int], *, connect_s: float) -> None:
        """Make the groups of all trainers and of these generation ranks."""
        self._members = members
        self._is_first = self._rank in (0, members[0])
        cpu = torch.device("cpu")
        messages = self._group("messages", cpu, connect_s=connect_s)
        route = Route(
            texts=messages,
            pieces=self._group("weights", self._device, connect_s=connect_s),
            receivers=self._group(
                "receivers", self._device, connect_s=connect_s, first=self.num_training
            )
            if self.is_generation
            else None,
            bucket_bytes=TRANSFER_BYTES[self._device.type],
        )
        with self._lock:
            self.messages, self._route, self._own_group = messages, route, None
            if self._lost.intersection(members):
                self._end_operations()

    def _group(
        self, name: str, where: torch.device, *, connect_s: float, first: int = 0
    ) -> OutsideGroup:
        """A new group of all ranks that are left, from the one at place `first` on."""
        ranks = [*range(self.num_training), *self._members][first:]
        own = dist.PrefixStore(f"gapo_megatron_{name}_{self._epoch}", self._store)
        return OutsideGroup(
            own,
            rank=ranks.index(self._rank),
            size=len(ranks),
            device=where,
            timeout_s=self._timeout_s,
            connect_s=connect_s,
        )

    def _break(self, lost: frozenset[int]) -> None:
        """End all operations with other ranks if some of these are gone. Called in a thread.

        Those that take part may be fewer already: rank 0 may have known it before this rank.
        """
        with self._lock:
            self._lost = lost
            if lost.intersection(self._members):
                self._end_operations()

    def _end_operations(self) -> None:
        for group in (self.messages, self._route.pieces, self._route.receivers):
            if group is not None:
                group.abort()
        if (own := self._own_group) is not None:
            abort_gloo(own, rank=own.rank(), size=own.size())

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the bridge once no message is pending. Call it last, on every rank of both sides.

        Job rank 0 hosts the store: no rank leaves before all are here. Only `beat` may still be
        called, and does nothing.

        Collectives: a barrier over all ranks of the job.
        """
        self._is_first = False  # no beats: after the barrier rank 0 may exit, with the mailbox
        self.messages.barrier()
        if self._presence is not None:
            self._presence.leave()
            self._presence = None
        for group in (self.messages, self._route.pieces, self._route.receivers):
            if group is not None:
                group.close()
