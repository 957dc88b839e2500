"""The Megatron-core side: model, optimizer, log-probs and updates."""

from gapo_megatron.policy.parallel import ParallelGroups, destroy, initialize
from gapo_megatron.policy.policy import Policy

__all__ = [
    "ParallelGroups",
    "Policy",
    "destroy",
    "initialize",
]
