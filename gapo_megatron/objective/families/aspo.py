"""ASPO weights correct tokens by the inverse of their ratio, wrong ones by the ratio.

    q_t = min(r_t, 1 + eps_high) where A_i > 0, max(r_t, 1 - eps_low) where A_i < 0
    l_t = -A_i min(1 / q_t, ratio_max) where A_i > 0, -A_i min(q_t, ratio_max) where A_i < 0

All are [T]. The gradient at log_probs_t is -A_i times that weight, also where ratio_max bounds it
(as in CISPO); the gradient of the inverse itself would have the opposite sign. It is exactly 0 for
A > 0 above 1 + eps_high and A < 0 below 1 - eps_low, as in PPO. A correct token with r < 1 is
pulled harder the smaller r is; in PPO it is pulled less.

Without a clip the gradient mass would be |A| / r or |A| r, by the sign of A. The part above the cap
counts as lost.

Source: arXiv 2510.06062 (abstract read; equations from two transcriptions) and the authors' code
(wizard-III/Archer2.0), the only source of ratio_max = 3. That code differs in three points. Above
the cap its loss is -3 A log_probs_t: the same gradient, another scale of the value. It averages
over the tokens of micro-batches of one response, which is `sequence_mean`, as in the
transcriptions. It doubles both widths for the fifth of a response's tokens with the largest
entropy; this is omitted here, because the paper's equation, as transcribed, has one width, and the
rule would need the entropy of every token.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def aspo_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    assert tokens.per_token, "ASPO weighs single tokens"
    ratio, advantages = tokens.ratio(), tokens.per_ratio(tokens.advantages)
    high, low = 1 + tokens.per_ratio(tokens.upper), 1 - tokens.per_ratio(tokens.lower)
    value, is_right = ratio.detach(), advantages > 0
    too_high, too_low = is_right & (value > high), (advantages < 0) & (value < low)
    clipped = too_high | too_low

    bounded = torch.where(too_high, high, torch.where(too_low, low, value))
    weight = torch.where(is_right, 1 / bounded, bounded).clamp(max=tokens.method.ratio_max)
    # The quotient is 1 and has the gradient 1: it carries that of the weight, capped or not.
    carrier = torch.where(clipped, 1, ratio / value)
    mass = advantages.abs() * torch.where(is_right, 1 / value, value)
    return tokens.sum_losses(-advantages * weight * carrier), {
        "clipped": clipped,
        "gradient_mass": mass,
        "gradient_mass_kept": torch.where(clipped, 0, advantages.abs() * weight),
    }
