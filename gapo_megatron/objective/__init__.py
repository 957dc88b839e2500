"""From verdicts to a loss: groups, advantages, clip widths, losses, and diagnostics per c.

Implements docs/objective.md. Imports neither megatron nor vllm.
"""

from gapo_megatron.config.methods import METHODS, Method
from gapo_megatron.objective.clipping import upper_clip
from gapo_megatron.objective.groups import group_advantages, group_counts, make_batch
from gapo_megatron.objective.importance import (
    importance_weights,
    token_importance_weights,
    weigh_gradient,
)
from gapo_megatron.objective.losses import (
    PolicyLoss,
    decide,
    kl_penalty,
    policy_loss,
)

__all__ = [
    "METHODS",
    "Method",
    "PolicyLoss",
    "decide",
    "group_advantages",
    "group_counts",
    "importance_weights",
    "kl_penalty",
    "make_batch",
    "policy_loss",
    "token_importance_weights",
    "upper_clip",
    "weigh_gradient",
]
