"""Truncated importance weights: from the policy that sampled to the old policy of the ratio.

The two differ by the engine's kernels and precision and, for a batch sampled ahead, by the steps
since then. docs/objective.md compares the weights ("Batches that older weights sampled").
"""

from __future__ import annotations

import torch

from gapo_megatron.logprob import Sequences
from gapo_megatron.objective.clipping import bounded_exp


def importance_weights(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    *,
    sequence_ids: torch.Tensor | Sequences,
    num_sequences: int,
    largest: float,
) -> torch.Tensor:
    """Weights of sequences: the geometric mean over a sequence's tokens, as its ratio has it.

        w_i = min(exp(mean_t(old_log_probs - rollout_log_probs)), largest)

    Args:
        old_log_probs: [T] the trainer's, at the weights that the step begins with; T = response
            tokens.
        rollout_log_probs: [T] the engine's own while it sampled.
        sequence_ids: [T] int64 in 0..num_sequences-1, in any order; or the `Sequences` of them.
        num_sequences: B.
        largest: upper bound of a weight, 1 or more.

    Returns:
        [B] float64 in (0, largest], detached. Exactly 1 where both are equal.
    """
    sequences = Sequences.of(sequence_ids, num_sequences)
    means = sequences.log_ratio(old_log_probs.detach(), rollout_log_probs)
    return bounded_exp(means).clamp(max=largest)


def token_importance_weights(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, *, largest: float
) -> torch.Tensor:
    """Weights of single tokens ("TIS").

        w_t = min(exp(old_log_probs_t - rollout_log_probs_t), largest)

    Arguments as in `importance_weights`.

    Returns:
        [T] float64 in (0, largest], detached. Exactly 1 where both are equal.
    """
    difference = old_log_probs.detach().double() - rollout_log_probs.double()
    return bounded_exp(difference).clamp(max=largest)


def weigh_gradient(log_probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply the gradient at each token's log-prob by a weight, and leave the value as it is.

    So a token's weight means the same in every family, whether its ratio is a token's or a
    sequence's.

    Args:
        log_probs: [T] with autograd, finite.
        weights: [T], without autograd.

    Returns:
        [T] of the dtype of `log_probs`, bitwise equal to it.
    """
    value = log_probs.detach()
    return value + weights.to(log_probs.dtype) * (log_probs - value)
