"""Replicas of a job, when others of it are gone."""

from __future__ import annotations

from typing import Any, cast

from gapo_megatron.rollout.replicas import Replicas


def test_a_replica_keeps_its_number() -> None:
    """Files are named by it: the ranks of a lost one may still write to theirs."""
    replicas = Replicas(rank=3, world_size=4, size=2)
    replicas.go_on(rank=1, world_size=2, gloo_group=cast(Any, None))
    assert (replicas.number, replicas.rank, replicas.count) == (1, 1, 1)
