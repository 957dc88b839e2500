"""DGPO lets the gradient of a token decay beyond PPO's bounds instead of ending there.

    l_t = -A_i stop_gradient(decay_t) r_t, with decay_t = 1 but
    A_i < 0 and r_t < lo = 1 - eps_low           decay_t = (r_t / lo)^decay_low
    A_i > 0 and r_t > hi = 1 + eps_high(c_i)     decay_t = (hi / r_t)^(1 / decay_high)

All are [T]. In the source this is a weight W of the gradient of the probability p, not of its
logarithm: C p^n where A < 0, C p^(-1/m) where A > 0, 1 / p_old otherwise, with C such that W is
continuous, n = decay_low, m = decay_high. Where A < 0 the gradient's size falls as r^(n + 1), so it
vanishes with the token; where A > 0 it still grows, as r^(1 - 1/m). No row with A != 0 has exactly
no gradient. Beyond the bounds a ratio counts as clipped.

Source: arXiv 2603.14389, whose abstract was read, and the authors' code (VenomRose-Juri/DGPO-RL,
commit cc225d4): the equation in its README and `compute_policy_loss`. n = 1 and m = 2 are its
defaults; it advises n = 2 for a model of 1.5B. Widths, aggregation and advantages are those of its
example. Not read: the paper's own settings.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def dgpo_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    method = tokens.method
    assert method.decay_low is not None and method.decay_high is not None, method
    ratio, advantages = tokens.ratio(), tokens.per_ratio(tokens.advantages)
    high, low = 1 + tokens.per_ratio(tokens.upper), 1 - tokens.per_ratio(tokens.lower)
    value = ratio.detach()
    too_high, too_low = (advantages > 0) & (value > high), (advantages < 0) & (value < low)

    # Not by `pow`, whose bits depend on a value's place in the array.
    below = method.decay_low * (value / low).log()
    above = (high / value).log() / method.decay_high
    decay = torch.where(too_low, below, torch.where(too_high, above, 0)).exp()
    return tokens.sum_losses(-advantages * decay * ratio), {
        "clipped": too_high | too_low,
        "gradient_mass_kept": advantages.abs() * decay * value,
    }
