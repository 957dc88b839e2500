"""GMPO: the geometric mean of a response's token ratios, each clipped on one side.

    x_t = min(log_ratio_t, log(1 + eps_high(c_i)))   where A_i > 0
          max(log_ratio_t, log(1 - eps_low))         where A_i < 0
    l_i = -A_i G_i,  G_i = exp(mean_t x_t)

Every token of sequence i carries l_i, so its sum over them is |y_i| l_i; with `sequence_mean` the
loss is the mean of l_i over sequences. Ratios and clips are per token, [T]: `ratio = "token"`. The
preset's bounds are exp(-0.4) and exp(0.4).

A token beyond its bound has exactly no gradient, and enters G_i at the bound; all other tokens of
the sequence have the gradient -A_i G_i. With A < 0 a large log-ratio is not clipped: it raises G_i
for the whole response (bounded at exp(20), like every ratio). With A < 0 the clip raises G_i, and
so the weight of the other tokens; this is no loss of gradient mass.

Source: arXiv 2507.20673, as given by three transcriptions; the paper's text was not read. The code
of the authors, verl and TRL agree on this equation. TRL's documentation swaps asymmetric bounds for
A < 0; its code does not. Settings of verl and TRL are the logs of the bounds; here they are
distances from 1.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.clipping import bounded_exp
from gapo_megatron.objective.families.base import LossInputs, LossResult


def gmpo_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    assert tokens.per_token, f"gmpo clips token ratios, not ratio {tokens.method.ratio!r}"
    log_ratio = tokens.log_ratio
    advantages = tokens.per_ratio(tokens.advantages)
    low = tokens.per_ratio(torch.log1p(-tokens.lower))
    high = tokens.per_ratio(torch.log1p(tokens.upper))

    # As in `clipped`: selecting by the condition makes the zero gradient exact.
    too_high = (advantages > 0) & (log_ratio > high)
    too_low = (advantages < 0) & (log_ratio < low)
    bounded = torch.where(too_high, high, log_ratio)
    bounded = torch.where(too_low, low, bounded)
    clipped = too_high | too_low
    mean_ratio = _geometric_mean(bounded, tokens)

    size = tokens.advantages.abs()
    kept = (size * mean_ratio.detach())[tokens.sequence_ids]
    return -tokens.counts * tokens.advantages * mean_ratio, {
        "clipped": clipped,
        "gradient_mass": (size * _geometric_mean(log_ratio.detach(), tokens))[tokens.sequence_ids],
        "gradient_mass_kept": torch.where(clipped, 0, kept),
    }


def _geometric_mean(log_ratio: torch.Tensor, tokens: LossInputs) -> torch.Tensor:
    """[B] float64 with autograd: exp(mean_t log_ratio)."""
    return bounded_exp(tokens.sequences.mean(log_ratio))
