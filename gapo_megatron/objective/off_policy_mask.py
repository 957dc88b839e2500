"""The off-policy sequence mask (OPSM): drops wrong responses that became much less likely.

    M_i = 0 where A_i < 0 and mean_t(old_log_probs - log_probs) > delta, else 1

M_i multiplies the loss of sequence i in any family, and carries no gradient. Denominators still
count dropped responses. Responses that became more likely, and all with A_i >= 0, are kept.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, as given by two transcriptions; slime, miles
and TRL implement it. delta is 1e-4 in slime and miles, TRL suggests 0.5; the report gives no value.
"""

from __future__ import annotations

import torch

from gapo_megatron.objective.families import LossInputs


def is_off_policy(tokens: LossInputs) -> torch.Tensor:
    """[B] bool: M_i = 0. Does not synchronise with the device."""
    assert tokens.method.off_policy_mask is not None
    drift = tokens.sequence_log_ratio().detach()
    return (tokens.advantages < 0) & (-drift > tokens.method.off_policy_mask)
