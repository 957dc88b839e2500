"""ABC clips on both sides of 1 whatever the sign of A, with four widths.

    l_t = -A_i clip(r_t, 1 - eps_low_correct, 1 + eps_high(c_i))    where A_i > 0
          -A_i clip(r_t, 1 - eps_low, 1 + eps_high_wrong)           where A_i < 0

All are [T]. There is no minimum with the unclipped surrogate, so the gradient is exactly 0 beyond
all four bounds: a correct token that fell far and a wrong one that rose far are not pulled back.
In the source the widths are eps_2, eps_1, eps_4 and eps_3, in this order. An infinite
eps_high_wrong and eps_low_correct = 1 make it PPO's.

Source: arXiv 2601.03895, equations 5 to 13 and algorithm 1, read in full, with all four at 0.2. Its
advantages are not divided by the standard deviation; the recipes of its authors' repository
(chi2liu/ABC-GRPO, `scale_rewards: true`) divide them. Their loss's code, a branch of TRL, was not
readable.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def abc_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    method, is_correct = tokens.method, tokens.advantages > 0
    assert method.eps_low_correct is not None and method.eps_high_wrong is not None, method
    ratio, advantages = tokens.ratio(), tokens.per_ratio(tokens.advantages)
    lower = torch.where(is_correct, method.eps_low_correct, tokens.lower)
    upper = torch.where(is_correct, tokens.upper, method.eps_high_wrong)
    low, high = 1 - tokens.per_ratio(lower), 1 + tokens.per_ratio(upper)

    too_high, too_low = ratio > high, ratio < low
    bounded = torch.where(too_high, high, torch.where(too_low, low, ratio))
    clipped = ((advantages != 0) & (too_high | too_low)).detach()
    return tokens.sum_losses(-advantages * bounded), {"clipped": clipped}
