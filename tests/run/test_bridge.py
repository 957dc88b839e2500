"""Two sides of a job: worlds of their own, and what leads from one to the other."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from gapo_megatron.run import processes
from gapo_megatron.run.process_group import World
from tests.dist import run_sides


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
