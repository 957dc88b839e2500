"""The bridge between the ranks that train and the ranks that only generate.

Each side has its own default process group and reaches the other side's ranks only through this
file. The bridge only transports; `generation_ranks.py` and `generation_side.py` decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.compat.torch_groups import OutsideGroup
from gapo_megatron.models.rules import Place, Rule
from gapo_megatron.policy.export import Exported
from gapo_megatron.rollout import transfer
from gapo_megatron.rollout.transfer import TRANSFER_BYTES, Route
from gapo_megatron.run.mailbox import Mailbox
from gapo_megatron.run.presence import Presence

T = TypeVar("T")

_BEAT_EVERY_S = 0.1
"""Shortest time between two beats that are posted."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.25
"""Bounds of the polling interval: a twentieth of the time waited, longer with many ranks."""


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

    Attributes:
        mail: the mailbox.
        num_training: ranks that train, T.
        num_generation: ranks that only generate, G.
        is_generation: whether this rank only generates.
        messages: gloo group of all ranks of the job, for buffers in host memory.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        num_training: int,
        num_generation: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Join the two sides.

        Args:
            store: the store that all ranks of the job use.
            rank: this process's rank in the job.
            num_training: ranks that train.
            num_generation: ranks that only generate.
            device: where this rank holds weights.
            timeout_s: longest that an operation of the groups may wait.

        Collectives: creation of three groups: twice all ranks of the job; the ranks that generate.
        """
        self.num_training, self.num_generation = num_training, num_generation
        self.is_generation = rank >= num_training
        self.mail = Mailbox(dist.PrefixStore("gapo_megatron_mail", store))
        self._beats = dist.PrefixStore("gapo_megatron_beats", store)
        self._is_first = rank in (0, num_training)
        self._next_beat_s = 0.0
        size = num_training + num_generation

        def group(name: str, where: torch.device, *, first: int = 0) -> OutsideGroup:
            """A group of all ranks from `first` on."""
            own = dist.PrefixStore(f"gapo_megatron_{name}", store)
            return OutsideGroup(
                own, rank=rank - first, size=size - first, device=where, timeout_s=timeout_s
            )

        self.messages = group("messages", torch.device("cpu"))
        self._route = Route(
            texts=self.messages,
            pieces=group("weights", device),
            receivers=group("receivers", device, first=num_training)
            if self.is_generation
            else None,
            bucket_bytes=TRANSFER_BYTES[device.type],
        )
        self._presence: Presence | None = None

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
        """
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

    # --- the end ---------------------------------------------------------------------------------

    def watch_ranks(self) -> None:
        """End this process, naming the rank in an error, once another rank of the job is gone.

        Not under a launcher that ends the ranks itself: they would exit before it has their
        stacks. Call it on every rank or on none; no collective.
        """
        self._presence = Presence(self.messages, num_training=self.num_training)

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
