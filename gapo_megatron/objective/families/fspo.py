"""FSPO: the product ratio of a response, in a band that widens with the root of its length.

    S_i = sum_t(log_probs - old_log_probs), L_i tokens, w_i = exp(S_i)
    l_i = max(-A_i w_i, -A_i exp(clip(S_i, -eps_low sqrt(L_i), eps_high sqrt(L_i))))

l is [B] and counts once per response, so every token has the gradient -A w, not divided by L.
eps_low and eps_high are the two constants c of the band, in log space. The gradient of the whole
response is exactly 0 for A > 0 above the band and A < 0 below it. On the other side only
`clipping.MAX_LOG_RATIO` bounds w. With `ratio="sequence"` the same gate applies to w = exp(S / L),
which every token carries: an older form of the third party's code, to first order in the width.

Source: arXiv 2509.09177 (abstracts of its versions and reviews were read), and a third party's code
(quantumglass/GRPO-series), which gives the equation, the constants 0.03 and advantages divided by
their standard deviation. Not read: the paper's equations 3 to 5, its constants, its aggregation.
The first version centres the band on a drift; later ones and the code do not. Reviews mention a
dual clip for A < 0 above the band; the code has none, and its form is unknown.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.clipping import bounded_exp
from gapo_megatron.objective.families.base import LossInputs, LossResult


def fspo_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    assert not tokens.per_token, "FSPO clips whole responses"
    ratio, advantages = tokens.ratio(), tokens.advantages
    total = tokens.sequences.log_ratio(tokens.log_probs.detach(), tokens.old_log_probs, mean=False)
    root = tokens.counts.clamp(min=1).double().sqrt()  # 1 for a response without tokens
    high, low = tokens.upper * root, -tokens.lower * root
    too_high = (advantages > 0) & (total > high)
    too_low = (advantages < 0) & (total < low)

    edge = torch.where(too_high, high, low)
    if tokens.method.ratio == "sequence":
        edge = edge / tokens.counts.clamp(min=1)
    clipped = too_high | too_low
    losses = -advantages * torch.where(clipped, bounded_exp(edge), ratio)
    return tokens.sum_losses(losses), {"clipped": clipped}
