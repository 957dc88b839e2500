"""TOPR learns correct responses with any ratio, and tapers the ratio of wrong ones.

    A_i > 0    l_t = -A_i log_probs_t
    A_i < 0    l_t = -A_i stop_gradient(clip(w, 1 - eps_low, 1 + eps_high)) log_probs_t

w is the product ratio of the response, [B], which its tokens share; with `ratio="token"` each token
has its own, as in ROLL and Trinity-RFT. The canonical taper 0..1 is eps_low = 1, eps_high = 0.
Every row with A != 0 has a gradient: w only becomes small, down to exp(-MAX_LOG_RATIO).

A wrong response counts as clipped, and loses gradient mass, if its weight is not its ratio. The
weight of a correct one does not depend on the ratio: it is never clipped, and its gradient mass is
|A|. The loss is continuous in the ratio, so rounding has no edge to cross. The widths apply to
wrong responses only, so a width by c would do nothing.

Source: arXiv 2503.14286 (abstract read; equations from transcriptions that agree, such as ROLL's).
The paper sums over tokens and multiplies by the raw reward minus a constant; here, as in all code,
by A. ROLL chooses the side by the score, not by A. It is open whether the paper divides log-probs
by the length; the transcriptions do not.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import LossInputs, LossResult


def topr_loss(tokens: LossInputs) -> LossResult:
    """See the module for the equation."""
    ratio = tokens.ratio().detach()
    advantages, upper = tokens.per_ratio(tokens.advantages), tokens.per_ratio(tokens.upper)
    lower = tokens.per_ratio(tokens.lower)
    untapered = torch.where(advantages < 0, ratio, 1)
    tapered = torch.maximum(torch.minimum(ratio, 1 + upper), 1 - lower)
    weight = advantages * torch.where(advantages < 0, tapered, 1)
    token_weight = weight if tokens.per_token else weight[tokens.sequence_ids]
    return tokens.sequences.sum(-token_weight * tokens.log_probs.double()), {
        "clipped": (advantages < 0) & (tapered != ratio),
        "gradient_mass": advantages.abs() * untapered,
        "gradient_mass_kept": weight.abs(),
    }
