"""One response of c = 4 of 8 under a method."""

from __future__ import annotations

import torch
from torch import Tensor

from gapo_megatron.objective import Method, PolicyLoss, policy_loss


def loss_of(
    method: Method,
    advantage: float,
    log_probs: Tensor,
    old_log_probs: Tensor,
    *,
    num_correct: int = 4,
    num_tokens: int | None = None,
    keys: Tensor | None = None,
) -> PolicyLoss:
    """`policy_loss` of log-probs [T]; the mini-batch is this response, or has `num_tokens`."""
    size = len(log_probs)
    return policy_loss(
        log_probs,
        old_log_probs,
        sequence_ids=torch.zeros(size, dtype=torch.int64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        num_correct=torch.tensor([num_correct]),
        group_size=8,
        num_tokens_global=num_tokens or size,
        num_sequences_global=1,
        method=method,
        keys=keys,
    )
