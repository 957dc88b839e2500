"""The off-policy sequence mask (OPSM): wrong responses that became much less likely are left out.

    M_i = 0 where A_i < 0 and mean_t(old_log_probs - log_probs) > delta, else 1

M_i multiplies the loss of sequence i, whatever family made it; denominators keep what it drops. It
carries no gradient. A response that became more likely, and every A_i >= 0, is kept.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, as two transcriptions give it; slime, miles
and TRL ship it. delta is 1e-4 in slime and miles, TRL suggests 0.5; the report names none.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families import MicrobatchTokens
from gapo_megatron.objective.segments import segment_mean


def is_off_policy(tokens: MicrobatchTokens) -> torch.Tensor:
    """[B] bool: M_i = 0. Nothing waits for the device."""
    assert tokens.method.off_policy_mask is not None
    log_ratio, num_sequences = tokens.log_ratio.detach(), len(tokens.advantages)
    drift = segment_mean(log_ratio, tokens.sequence_ids, num_sequences, tokens.counts)
    return (tokens.advantages < 0) & (-drift > tokens.method.off_policy_mask)
