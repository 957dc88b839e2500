"""The Megatron-core side: model, optimizer, log-probs and updates. Alone imports megatron."""

import warnings

from gapo_megatron.policy.parallel import ParallelGroups, destroy, initialize
from gapo_megatron.policy.policy import Policy

# What Megatron-core says of itself, at every step or build: nothing a user could act on.
for _message in (
    "Warning: tp_group is None",
    "full scope is deprecated",
    "When using async grad allreduce",
    "The .grad attribute of a Tensor that is not a leaf",
    r"`torch.distributed.\w+` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)

__all__ = [
    "ParallelGroups",
    "Policy",
    "destroy",
    "initialize",
]
