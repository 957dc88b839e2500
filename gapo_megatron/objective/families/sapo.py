"""SAPO: a smooth gate instead of a clip, with a temperature by the sign of A.

    l_t = -A_i f(s_t),  f(s) = 4 width sigmoid((s - 1) / width)

The widths are inverse temperatures: tau = 1 / width, width = eps_high(c_i) where A > 0, else
eps_low. The ratio is not detached: the gradient at log_probs_t is -A_i s_t w(s_t), with the gate

    w(s) = f'(s) = 4 p (1 - p) = sech^2((s - 1) / (2 width)),  p = sigmoid((s - 1) / width)

w is 1 at s = 1 for every width, so gradients are comparable with those of the clipped surrogate.
Losses are not: at s = 1 the loss is -2 width A. s w(s) is largest near s = 2, and w stays above 3/4
down to s = 0 at the preset's widths: in practice the gate only acts above 1.

A ratio counts as clipped if w < 1/2: above s = 1 + 2 ln(1 + sqrt(2)) width, and as far below 1. The
loss has no edge there. By the equation only rows with A = 0 have exactly no gradient; in float64 p
rounds to 1, and the gradient to 0, about 37 widths above 1.

Source: arXiv 2511.20347, as given by four agreeing transcriptions and the code of TRL and verl; the
paper's text was not read. tau is 1.0 and 1.05. verl and SkyRL clamp the log-ratio to +-20, as here;
TRL and AReaL do not. The paper averages over a sequence's tokens first; AReaL, and SkyRL by
default, over all tokens.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def sapo_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    ratio = tokens.ratio()
    advantages = tokens.per_ratio(tokens.advantages)
    width = tokens.per_ratio(torch.where(tokens.advantages > 0, tokens.upper, tokens.lower))
    # 4 sigmoid(x) = 2 (1 + tanh(x / 2)): the bits of torch's sigmoid depend on a value's place.
    slope = torch.tanh((ratio - 1) / (2 * width))
    gate = (1 - slope * slope).detach()
    return tokens.sum_losses(-advantages * 2 * width * (1 + slope)), {
        "clipped": (advantages != 0) & (gate < 0.5),
        "gradient_mass_kept": advantages.abs() * ratio.detach() * gate,
    }
