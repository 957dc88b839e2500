"""Replicas of several ranks, when others of the job are gone."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gapo_megatron.errors import MachineError
from gapo_megatron.rollout.replicas import Replicas


class Told(Replicas):
    """Rank 0 or 1 of a replica, which its first rank has told `word`."""

    word: Any = None

    def agree(self, answer: Any) -> Any:
        if self.is_first_of_replica:
            Told.word = answer
        return Told.word


def told(rank: int, *, outlives: bool = True) -> Told:
    replicas = Told(rank=rank, world_size=4, size=2, replica_group=cast(Any, "group"))
    replicas.outlives_others = outlives
    return replicas


def lost() -> bool:
    raise MachineError("a rank is gone")


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (lambda: False, lambda: True, [False, False]),
        (lambda: False, lost, [False, False]),  # the first rank will find out, too
        (lost, lambda: False, ["a rank is gone", "connection closed"]),
        (lost, lost, ["a rank is gone"] * 2),
    ],
)
def test_the_ranks_of_a_replica_leave_at_the_same_step(first: Any, second: Any, found: Any) -> None:
    for rank, (question, expected) in enumerate(zip((first, second), found, strict=True)):
        replicas = told(rank)
        if isinstance(expected, str):
            with pytest.raises((RuntimeError, MachineError), match=expected):
                replicas.in_step(question)
        else:
            assert replicas.in_step(question) is expected


def test_where_a_loss_ends_the_job_each_rank_fails_by_itself() -> None:
    for replicas in (told(1, outlives=False), Replicas(rank=1, world_size=2, size=1)):
        with pytest.raises(MachineError):
            replicas.in_step(lost)


def test_a_replica_keeps_its_number() -> None:
    """Files are named by it: the ranks of a lost one may still write to theirs."""
    replicas = told(3)
    replicas.go_on(rank=1, world_size=2, gloo_group=cast(Any, None))
    assert (replicas.number, replicas.rank, replicas.count) == (1, 1, 1)
