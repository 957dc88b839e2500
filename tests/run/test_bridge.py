"""Two sides of a job: separate default groups, and the bridge between them."""

from __future__ import annotations

import os
from itertools import count
from threading import Timer
from typing import Any, cast

import torch
import torch.distributed as dist

from gapo_megatron.compat.vllm import launched_as_this_world
from gapo_megatron.errors import RolloutError, WeightSyncError
from gapo_megatron.run import bridge as module
from gapo_megatron.run import processes
from gapo_megatron.run.bridge import Bridge
from gapo_megatron.run.process_group import World
from tests.dist import run_sides
from tests.transfer_setup import exported_of, rule_of
from tests.waiting import HANG_S


def _launched() -> list[list[str]]:
    """Variables for vLLM's external launcher before, during and after building an engine."""
    names, seen = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), []
    seen.append([os.environ[name] for name in names])
    with launched_as_this_world():
        seen.append([os.environ[name] for name in names])
    seen.append([os.environ[name] for name in names])
    return seen


def _look_around(world: World) -> dict[str, object]:
    total = torch.tensor([int(os.environ["RANK"]) + 1])
    dist.all_reduce(total)
    by_gloo = torch.tensor([int(os.environ["RANK"]) + 1])
    dist.all_reduce(by_gloo, group=world.gloo_group)
    return {
        "world": (world.rank, world.world_size, world.local_rank),
        "torch": (dist.get_rank(), dist.get_world_size()),
        "sums": (int(total), int(by_gloo)),
        "first": processes.is_first(),
        "launched": _launched(),
        "bridge": world.bridge
        and (world.bridge.num_training, world.bridge.num_generation, world.bridge.is_generation),
    }


def test_each_side_is_a_world_of_its_own() -> None:
    seen = run_sides(_look_around, 2, 2)
    assert [one["world"] for one in seen] == [(0, 2, 0), (1, 2, 1), (0, 2, 2), (1, 2, 3)]
    assert [one["torch"] for one in seen] == [(0, 2), (1, 2)] * 2
    assert [one["sums"] for one in seen] == [(3, 3), (3, 3), (7, 7), (7, 7)]
    assert [one["first"] for one in seen] == [True, False, False, False]
    assert [one["bridge"] for one in seen] == [(2, 2, side) for side in (False, False, True, True)]
    launched = [one["launched"] for one in seen]
    for job_rank, (before, meanwhile, after) in enumerate(launched):
        assert before == after == [str(job_rank), "4", str(job_rank)]
        assert meanwhile == [str(job_rank % 2), "2", str(job_rank)]


def test_without_generation_ranks_all_are_one_side() -> None:
    """The default group keeps its store keys, and only the gloo group is created besides."""
    seen = run_sides(_look_around, 2, 0)
    assert [one["world"] for one in seen] == [(0, 2, 0), (1, 2, 1)]
    assert [one["sums"] for one in seen] == [(3, 3), (3, 3)]
    assert [one["bridge"] for one in seen] == [None, None]
    assert seen[1]["launched"] == [["1", "2", "1"]] * 3


def _bridge(world: World) -> Bridge:
    assert world.bridge is not None
    return world.bridge


def _weights(world: World) -> list[tuple[str, list[float]]]:
    bridge = _bridge(world)
    exported = exported_of([rule_of("a", (4,), tp_dim=0), rule_of("b", (2,))], num_ranks=2)
    if bridge.is_generation:
        whole = bridge.receive_whole(exported)
        return [(rule.megatron, tensor.tolist()) for rule, _, tensor in whole]
    shards = {"a": torch.tensor([1.0, 2.0]) + 2 * world.rank, "b": torch.tensor([5.0, 6.0])}
    bridge.send_shards(exported, shards.__getitem__)
    return []


def test_weights_come_from_all_trainers() -> None:
    whole = [("a", [1.0, 2.0, 3.0, 4.0]), ("b", [5.0, 6.0])]
    assert run_sides(_weights, 2, 2) == [[], [], whole, whole]


def _wait_for_the_other(world: World) -> list[object]:
    """A trainer waits for a message, then beside a silent side, then beside a side that beats."""
    bridge = _bridge(world)
    if bridge.is_generation:
        bridge.wait(lambda: bridge.mail.look("silence has been seen"), alive=lambda: None)
        while bridge.mail.look("enough") is None:
            bridge.beat()
        return [bridge.beats_seen()]
    calls: list[int] = []
    looks = count()
    found = bridge.wait(lambda: next(looks) >= 5 or None, alive=lambda: calls.append(0))
    seen: list[object] = [found, len(calls)]
    bridge.mail.post("silence has been seen", b"")
    bridge.wait(lambda: len(calls) >= 4 or None, alive=lambda: calls.append(0))
    bridge.mail.post("enough", b"")
    return [*seen, bridge.beats_seen() >= 2]


def test_a_rank_that_waits_is_alive_only_while_the_other_side_is() -> None:
    """Otherwise its own watch ends it. A waiting rank sends no beats: two could wait forever."""
    assert run_sides(_wait_for_the_other, 1, 1) == [[True, 1, True], [0]]


def _leave(world: World) -> int:
    """Beats of this side in the store, before and after it has left."""
    bridge = _bridge(world)
    bridge.beat()
    bridge.close()
    bridge._next_beat_s = 0.0
    bridge.beat()
    # This world's store outlives the test; that of a job goes with its rank 0.
    return bridge._beats.add(str(bridge.is_generation), 0)


def test_a_rank_that_has_left_asks_nothing_of_the_store() -> None:
    """At the second start of a finished run, rank 0 must not exit early with the store."""
    assert run_sides(_leave, 1, 1) == [1, 1]


def _blame(world: World) -> list[str]:
    """What comes of errors of an operation, before and after another rank is gone."""
    bridge = _bridge(world)
    cast(Any, module)._NOTICED_WITHIN_S = 0.0
    reset = RuntimeError("[pair.cc:537] Read error: Connection reset by peer")
    named = WeightSyncError("weights, bucket 2")
    named.__cause__ = reset
    whole = WeightSyncError("weight sync, version 0")
    whole.__cause__ = named
    errors: list[Exception] = [reset, whole, RolloutError("the engine is asleep")]
    found = []
    for is_gone in (False, True):
        if is_gone:
            cast(Any, module)._NOTICED_WITHIN_S = HANG_S
            noticed = Timer(0.3, lambda: setattr(bridge, "_lost", frozenset(bridge._members)))
            noticed.start()
        for error in errors:
            try:
                found.append(type(bridge.require_lost(error)).__name__)
            except Exception as raised:
                assert raised is error
                found.append("raised")
    bridge._lost = frozenset()
    return found


def test_a_lost_connection_is_a_lost_rank_if_one_is_noticed() -> None:
    """However many layers have named the error; and any error once a rank is gone."""
    before, after = ["raised"] * 3, ["LostRanksError"] * 3
    assert run_sides(_blame, 1, 1) == [before + after] * 2
