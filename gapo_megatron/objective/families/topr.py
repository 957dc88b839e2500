"""TOPR: right responses are learnt whatever their ratio; that of wrong ones tapers off.

    A_i > 0    l_t = -A_i log_probs_t
    A_i < 0    l_t = -A_i stop_gradient(clip(w, 1 - eps_low, 1 + eps_high)) log_probs_t

w is the product ratio of the response, [B], which its tokens share; `ratio="token"` gives each its
own, which is what ROLL and Trinity-RFT ship. The canonical taper 0..1 is eps_low = 1, eps_high = 0.
No row with A != 0 is without gradient: w only becomes small, as far as exp(-MAX_LOG_RATIO).

Of wrong responses those count as clipped, and lose gradient mass, whose weight is not their ratio.
The weight of right ones does not depend on the ratio at all: nothing there is clipped, and their
gradient mass is |A|. The loss is continuous in the ratio, so there is no edge for rounding. The
widths are the wrong responses' alone: a width by c would do nothing.

Source: arXiv 2503.14286 (abstract read; equations from transcriptions that agree, such as ROLL's).
The paper sums over tokens and multiplies by the raw reward less a constant; here, as in all code,
by A. ROLL takes its sides from the score, not from A. Whether the paper divides log-probs by the
length was not settled; the transcriptions do not.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families.base import Family, MicrobatchTokens, Terms


def _terms(tokens: MicrobatchTokens) -> Terms:
    ratio = tokens.ratio().detach()
    advantages, upper = tokens.per_ratio(tokens.advantages), tokens.per_ratio(tokens.upper)
    lower = tokens.per_ratio(tokens.lower)
    untapered = torch.where(advantages < 0, ratio, 1)
    tapered = torch.maximum(torch.minimum(ratio, 1 + upper), 1 - lower)
    weight = advantages * torch.where(advantages < 0, tapered, 1)
    token_weight = weight if tokens.per_token else weight[tokens.sequence_ids]
    return Terms(
        sums=tokens.sum_tokens(-token_weight * tokens.log_probs.double()),
        ratio=ratio,
        clipped=(advantages < 0) & (tapered != ratio),
        gradient_mass=advantages.abs() * untapered,
        gradient_mass_kept=weight.abs(),
    )


TOPR = Family(_terms, clip_stops_gradient=False)
