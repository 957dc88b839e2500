"""ATR bounds the KL estimate of a ratio ("k3"), so its band is narrower below 1 than above.

    KL3(r) = r - 1 - ln r,  which is at most eps in l(eps) <= r <= u(eps)
    l_t = max(-A_i r_t, -A_i clip(r_t, l(eps_low), u(eps_high(c_i))))

All are [T], or [B] with a sequence ratio. eps_low and eps_high are the largest KL3 below and above
1, in nats, not distances from 1; the source has one number delta for both. delta = 0.02 gives
0.813..1.214. l and u are the two roots of KL3(r) = eps (branches of the Lambert function), found by
Newton's method in ln r. The gradient is exactly 0 for A > 0 above u, and for A < 0 below l.

Source: arXiv 2602.05494. Its abstract was read, and what two sites quote or say of its text
(sciencestack.ai, arxivlens.com): the estimate, its range [l, u], and that bounding it equals an
asymmetric clip of the ratio in GRPO. Our reading: PPO's minimum around that clip, so that tokens on
their way back keep their gradient; GRPO's aggregation and advantages; delta = 0.02, the value whose
range is known to us. The paper's equations and its table of settings were not read.
"""

from __future__ import annotations

import dataclasses

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult
from gapo_megatron.objective.families.clipped import clipped_loss

_ITERATIONS = 5
"""Newton steps; four reach the precision of float64."""


def atr_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    lower = -torch.expm1(_root(tokens.lower, -1))
    upper = torch.expm1(_root(tokens.upper, 1))
    return clipped_loss(dataclasses.replace(tokens, lower=lower, upper=upper))


def _root(eps: torch.Tensor, sign: int) -> torch.Tensor:
    """[B] float64: x of this sign with exp(x) - 1 - x = eps, for eps >= 0."""
    eps = eps.clamp(min=torch.finfo(eps.dtype).tiny)  # at 0 a step would divide 0 by 0
    # The function is convex and both starts are outside the root: no step crosses it.
    width = (2 * eps).sqrt()
    x = torch.log1p(eps + width) if sign > 0 else -(eps + width)
    for _ in range(_ITERATIONS):
        x = x - (torch.expm1(x) - x - eps) / torch.expm1(x)
    return x
