"""The clipped surrogate: GAPO, GSPO, GRPO, Dr. GRPO, DAPO and their focal variants.

    l_i = max(-A_i s_i, -A_i clip(s_i, 1 - eps_low, 1 + eps_high(c_i)))

Sequence ratio: s_i and l_i are [B], and every token of sequence i carries l_i, so their sum is
|y_i| l_i. Token ratio: both are [T]. The caller divides by the global denominator.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def clipped_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    ratio = tokens.ratio()
    advantages = tokens.per_ratio(tokens.advantages)
    high, low = 1 + tokens.per_ratio(tokens.upper), 1 - tokens.per_ratio(tokens.lower)

    # The maximum takes the clipped branch, which has no gradient, only when A > 0 and s is above
    # the band or A < 0 and s is below it. Selecting by that condition makes the zero exact.
    too_high = (advantages > 0) & (ratio > high)
    too_low = (advantages < 0) & (ratio < low)
    bounded = torch.where(too_high, high, ratio)
    bounded = torch.where(too_low, low, bounded)
    losses = -advantages * bounded
    clipped = (too_high | too_low).detach()
    return tokens.sum_losses(losses), {"clipped": clipped}
