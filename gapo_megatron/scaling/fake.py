"""One rank of any layout, alone in its process: process groups that no one else is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gapo_megatron.config import ParallelConfig
from gapo_megatron.counts import check_world_size
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
    new_group = dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})  # Megatron-core asks for gloo's

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.object(dist, "new_group", new_fake_group):
            groups = parallel.initialize(config)
        try:
            yield groups
        finally:
            parallel.destroy()
    finally:
        dist.destroy_process_group()
