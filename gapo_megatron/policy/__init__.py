"""The Megatron-core model: build, shard, load, export, optimizer, parallel groups."""

from gapo_megatron.policy.parallel import ParallelGroups, destroy, initialize
from gapo_megatron.policy.policy import Policy

__all__ = [
    "ParallelGroups",
    "Policy",
    "destroy",
    "initialize",
]
