"""CISPO: the bounded ratio weights the log-probability and carries no gradient itself.

    l_t = -A_i stop_gradient(clip(s_t, 1 - eps_low, 1 + eps_high)) log_probs_t

l is [T]; the weight is [T], or [B] with a sequence ratio, whose tokens then share it. Every token
keeps a gradient. The caller divides by the global denominator.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def cispo_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    ratio = tokens.ratio().detach()
    advantages, upper = tokens.per_ratio(tokens.advantages), tokens.per_ratio(tokens.upper)
    lower = tokens.per_ratio(tokens.lower)
    bounded = torch.maximum(torch.minimum(ratio, 1 + upper), 1 - lower)
    weight = advantages * bounded
    token_weight = weight if tokens.per_token else weight[tokens.sequence_ids]
    return tokens.sequences.sum(-token_weight * tokens.log_probs.double()), {
        "clipped": (advantages != 0) & (bounded != ratio),
        "gradient_mass_kept": weight.abs(),
    }
