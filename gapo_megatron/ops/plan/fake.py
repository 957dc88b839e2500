"""One rank of any layout, alone in its process: process groups that no one else is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from gapo_megatron.compat.torch import fake_store
from gapo_megatron.config import ParallelConfig
from gapo_megatron.config.counts import check_world_size
from gapo_megatron.policy import parallel
from gapo_megatron.policy.parallel import ParallelGroups


@contextlib.contextmanager
def fake_groups(config: ParallelConfig, *, rank: int, world_size: int) -> Iterator[ParallelGroups]:
    """The process groups of rank `rank` of `world_size`, whose collectives move nothing.

    Torch's fake process groups: a collective returns at once, as if every other rank had what this
    one has, or leaves its output as it is. No default group may be up.

    Raises:
        ConfigError: the parallel sizes do not divide the world size.
    """
    check_world_size(config, world_size)
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        groups = parallel.initialize(config)
        try:
            yield groups
        finally:
            parallel.destroy()
    finally:
        dist.destroy_process_group()
