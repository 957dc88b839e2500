"""DCPO widens a token's clip as its old probability falls.

    q_t = exp(old_log_probs_t), r_t = exp(log_probs_t) / q_t
    lo_t = 1/2 + 1/2 sqrt(max(1 - 4 eps_low / q_t, 0))
    hi_t = min(1/2 + 1/2 sqrt(1 + 4 eps_high / q_t), ratio_max)
    A_i > 0    l_t = -A_i min(r_t, hi_t)
    A_i < 0    l_t = -A_i min(max(r_t, lo_t), ratio_max)

All are [T]. The bounds solve |r - 1| p <= eps with p = r q, so eps_low and eps_high are not bounds
of a ratio. The gradient is exactly 0 for A > 0 above hi, and for A < 0 below lo or above ratio_max;
a wrong token above ratio_max is never pulled back. ratio_max = 10 does not affect hi down to
q = 0.0022.

Source: arXiv 2509.02333, equations 3, 4 and 8, read in full in its OpenReview version, and the
authors' code (lime-RL/DCPO), whose scripts set the widths to 0.2 and 0.28 instead of the paper's
0.16 and 0.2. Aggregation: the paper sums the token means of responses, `sequence_mean` averages
them, and the authors' code averages over the tokens of a micro-batch. Omitted: the smoothed
advantage (SAS). It needs the rewards of all earlier visits to a prompt, and no script of the
authors enables it; without that history it is the usual advantage divided by the group's standard
deviation.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def dcpo_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    ratio, advantages = tokens.ratio(), tokens.per_ratio(tokens.advantages)
    low, high = _bounds(tokens)
    is_wrong = advantages < 0
    ceiling = torch.where(is_wrong, tokens.method.ratio_max, high)
    too_high = (advantages != 0) & (ratio > ceiling)
    too_low = is_wrong & (ratio < low)
    bounded = torch.where(too_high, ceiling, ratio)
    bounded = torch.where(too_low, low, bounded)
    clipped = (too_high | too_low).detach()
    return tokens.sum_losses(-advantages * bounded), {"clipped": clipped}


def _bounds(tokens: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] float64 each, detached: lo in 1/2..1 and hi in 1..ratio_max, also if q is 0."""
    assert tokens.per_token, "DCPO's bounds depend on the probability of a token"
    old = tokens.old_log_probs.double().exp()
    lower, upper = tokens.per_ratio(tokens.lower), tokens.per_ratio(tokens.upper)
    low = 0.5 + 0.5 * (1 - 4 * lower / old).clamp(min=0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * upper / old).sqrt()
    return low, high.clamp(max=tokens.method.ratio_max)
