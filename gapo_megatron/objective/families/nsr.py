"""NSR keeps some tokens just beyond PPO's bounds, by chance.

    u_t = 1 + rescue_noise (2 z_t - 1), z_t uniform in [0, 1)
    l_t = -A_i r_t where u_t r_t is within the bound that clips r_t, else
          max(-A_i r_t, -A_i clip(r_t, 1 - eps_low, 1 + eps_high(c_i)))

All are [T], or [B] with a sequence ratio. Only ratios that PPO clips can be rescued, and a rescued
one has the gradient -A r that it has without a clip. With w the noise and hi = 1 + eps_high, that
happens with probability (hi / r - (1 - w)) / 2w above hi: 1/2 at the bound, 0 from hi / (1 - w) on;
likewise below 1 - eps_low. The gradient is exactly 0 for clipped ratios that are not rescued. z_t
is a hash of the token's place in the run (`objective.draws`). `method/rescued` is the share of
ratios that were kept.

Source: arXiv 2605.22703. Its abstract was read, and a page on it (emergentmind.com, "Near-boundary
Stochastic Rescue"): tokens just beyond a clip of PPO's form keep their gradient by chance, those
far beyond it do not. Not read: the paper's equations. Our reading: the chance is noise that
multiplies the ratio and keeps the token if it brings it back, as a reader of the whole paper
describes it (in a summary whose address we do not have); the noise is around 1, and its width of
0.1 is ours; widths, aggregation and advantages are DAPO's, on which the paper builds. A change
offered to slime ("clip_signal_rescue") has another form: a constant probability within a margin.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def nsr_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    noise = tokens.method.rescue_noise
    assert noise is not None, tokens.method
    ratio, advantages = tokens.ratio(), tokens.per_ratio(tokens.advantages)
    high, low = 1 + tokens.per_ratio(tokens.upper), 1 - tokens.per_ratio(tokens.lower)

    value = ratio.detach()
    moved = value * (1 + noise * (2 * tokens.draws() - 1))
    too_high, too_low = (advantages > 0) & (value > high), (advantages < 0) & (value < low)
    rescued = (too_high & (moved <= high)) | (too_low & (moved >= low))
    too_high, too_low = too_high & ~rescued, too_low & ~rescued
    bounded = torch.where(too_high, high, torch.where(too_low, low, ratio))
    return tokens.sum_losses(-advantages * bounded), {
        "clipped": too_high | too_low,
        "rescued": rescued.double(),
    }
