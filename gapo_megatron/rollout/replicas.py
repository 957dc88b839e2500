"""Replicas: which ranks form an engine, how prompts are split, how ranks communicate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Self, TypeVar

import numpy as np
import torch.distributed as dist

from gapo_megatron.exchange import Channel, GroupChannel, gather_objects, gather_tables
from gapo_megatron.rollout.progress import Heartbeat, Tally

T = TypeVar("T")


class Replicas:
    """Every `size` consecutive ranks form a replica: an engine whose ranks run in lockstep.

    Each replica generates for its slice of the prompts (`share`). Every rank then processes its own
    part of these (`part`). `gather_tables` gives every rank the table of results; tokens stay where
    they are and are sent over `channel` to the ranks that compute them.

    Attributes:
        gloo_group: gloo group of all ranks, for Python objects.
        rank: this rank.
        world_size: number of ranks.
        size: ranks of a replica.
        number: number of this replica when the job began: no other one ever has it.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        size: int,
        gloo_group: dist.ProcessGroup | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        """No collective. `create` also creates the groups."""
        self.gloo_group = gloo_group
        self.rank = rank
        self.world_size = world_size
        self.size = size
        self.number = rank // size
        self._replica_group = replica_group

    @classmethod
    def create(cls, size: int, *, gloo_group: dist.ProcessGroup) -> Self:
        """Replicas of `size` ranks each, over the default process group.

        Collectives: creates a group per replica, if replicas have more than one rank.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        groups = [
            dist.new_group(range(first, first + size), backend="gloo")
            for first in (range(0, world_size, size) if size > 1 else ())
        ]
        return cls(
            rank=rank,
            world_size=world_size,
            size=size,
            gloo_group=gloo_group,
            replica_group=groups[rank // size] if groups else None,
        )

    def go_on(self, *, rank: int, world_size: int, gloo_group: dist.ProcessGroup) -> None:
        """Continue with the replicas that are left of a job that has lost others. No collective.

        Args:
            rank: this rank's number among those that are left.
            world_size: their number: whole replicas.
            gloo_group: all of them.
        """
        assert world_size % self.size == 0, (world_size, self.size)
        self.rank, self.world_size, self.gloo_group = rank, world_size, gloo_group
        self.__dict__.pop("channel", None)

    @property
    def count(self) -> int:
        """Number of replicas of the run."""
        return self.world_size // self.size

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0, which shows progress."""
        return self.rank == 0

    @cached_property
    def channel(self) -> Channel:
        """Channel of all ranks, for tokens."""
        return GroupChannel(self.gloo_group or dist.group.WORLD)

    @property
    def is_first_of_replica(self) -> bool:
        """Whether this is the first rank of its replica."""
        return self.rank % self.size == 0

    def share(self, prompts: Sequence[T], *, rank: int | None = None) -> list[T]:
        """This replica's contiguous slice of `prompts`; all replicas' slices cover it in order.

        With `rank`, the slice of that rank's replica.
        """
        rank = self.rank if rank is None else rank
        return _slice(prompts, rank // self.size, self.count)

    def part(self, groups: Sequence[T]) -> list[T]:
        """This rank's contiguous slice of its replica's `groups`; its ranks' slices cover them."""
        return _slice(groups, self.rank % self.size, self.size)

    def gather(self, groups: Sequence[T]) -> list[T]:
        """Gather a few small objects of every rank, in the order of ranks, on every rank.

        Args:
            groups: this rank's objects. Anything that pickles; no tokens.

        Collectives: `exchange.gather_objects` over all ranks (gloo).
        """
        received: list[list[T]] = gather_objects(list(groups), self.gloo_group)
        return [group for part in received for group in part]

    def gather_in_replica(self, one: T) -> list[T]:
        """Gather an object of every rank of this replica, in the order of ranks, on each of them.

        Args:
            one: this rank's object. Anything that pickles; no tokens.

        Collectives: one gather of objects within the replica, if it has more than one rank.
        """
        received = [one] * self.size
        if self.size > 1:
            dist.all_gather_object(received, one, group=self._replica_group)
        return received

    def gather_tables(self, table: np.ndarray) -> list[np.ndarray]:
        """Gather the tables of all ranks, by rank, on every rank.

        Collectives: `exchange.gather_tables`.
        """
        return gather_tables(table, self.gloo_group)

    def agree(self, answer: T) -> T:
        """The answer of the replica's first rank: its ranks must take every step together.

        Args:
            answer: anything small that pickles; used on the first rank alone.

        Collectives: one broadcast within the replica, if it has more than one rank.
        """
        if self._replica_group is None:
            return answer
        answers = [answer]
        dist.broadcast_object_list(answers, group_src=0, group=self._replica_group)
        return answers[0]

    def heartbeat(self) -> Heartbeat:
        """A new `Heartbeat` over all ranks, for one generation. No collective yet."""
        return Heartbeat(self.gloo_group)

    def tally(self, wanted: int) -> Tally:
        """A new `Tally` over all ranks, for one generation. No collective yet."""
        return Tally(self.gloo_group, wanted=wanted)


def _slice(items: Sequence[T], index: int, count: int) -> list[T]:
    return list(items[index * len(items) // count : (index + 1) * len(items) // count])


def assign(
    num_new: int, num_open: int, wanted: int, replicas: Replicas, *, rank: int | None = None
) -> tuple[list[int], list[int], int]:
    """Split the groups of a round over replicas: contiguous slices of new prompts and open groups.

    Open groups are numbered after the new prompts, so that every replica gets some.

    Args:
        num_new: prompts to begin.
        num_open: groups to continue.
        wanted: groups to complete, new and open together.
        replicas: replicas of the run.
        rank: a rank of the replica; None: this one.

    Returns:
        Numbers of the prompts that the replica begins, numbers of the open groups that it
        continues, and how many groups it has to complete.
    """
    everything = range(num_new + num_open)
    first = replicas.share(everything[:wanted], rank=rank)
    spare = replicas.share(everything[wanted:], rank=rank)
    new = [i for i in first + spare if i < num_new]
    return new, [i - num_new for i in first + spare if i >= num_new], len(first)
