"""DPPO, Binary-TV: masks tokens by the difference of probabilities, not by their ratio.

    p_t = exp(log_probs_t), q_t = exp(old_log_probs_t), r_t = p_t / q_t
    l_t = -stop_gradient(min(r_t, ratio_max)) A_i log_probs_t
    l_t = 0 where A_i > 0 and p_t - q_t > eps_high, or A_i < 0 and q_t - p_t > eps_low

l is [T]; eps_low and eps_high are differences of probabilities. Masked tokens have exactly no
gradient. Tokens on the other side, A > 0 with p < q and A < 0 with p > q, are never masked. A rare
token may grow many times before it is masked: only ratio_max bounds its weight.

Source: arXiv 2602.04879, equations 12, 13 and 23 (read as extracted text). Its sum over tokens
without division by lengths is `sequence_sum`; advantages are not divided by their standard
deviation. q is the policy that the engine sampled with; the paper warns against recomputing it with
the trainer. So `objective.old_log_probs = "rollout"` is the paper's choice, `"trainer"` that of
verl's function. Widths: 0.15 in the paper's stability study, 0.2 in most of its scaling runs.
ratio_max: 5 in the scaling runs, none in the study; 3 by default in verl (20 if the setting is
missing; its example disables it with 10000), 10 in the authors' Stable-RL with the same setting of
3, 20 in earlier TRL, none in SkyRL and prime-rl. Omitted: Binary-KL and the top-K forms.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def dppo_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    ratio = tokens.ratio().detach()
    advantages = tokens.per_ratio(tokens.advantages)
    growth = _growth(tokens)
    masked = (advantages > 0) & (growth > tokens.per_ratio(tokens.upper))
    masked |= (advantages < 0) & (-growth > tokens.per_ratio(tokens.lower))
    weight = advantages * ratio.clamp(max=tokens.method.ratio_max)
    weight = torch.where(masked, 0, weight)
    return tokens.sequences.sum(-weight * tokens.log_probs.double()), {
        "clipped": masked,
        "gradient_mass_kept": weight.abs(),
    }


def _growth(tokens: LossInputs) -> torch.Tensor:
    """[T] float64, detached: p - q, exactly 0 at equal log-probs."""
    assert tokens.per_token, "DPPO compares the probabilities of single tokens"
    return tokens.log_probs.detach().double().exp() - tokens.old_log_probs.double().exp()
