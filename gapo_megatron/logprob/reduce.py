"""From log-probs of packed tokens to one number per sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob.implementation import Name
from gapo_megatron.logprob.operator import token_log_probs
from gapo_megatron.objective.segments import segment_counts, segment_sum


def sequence_log_ratio(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    old_log_probs: torch.Tensor,
    *,
    sequence_ids: torch.Tensor,
    num_sequences: int,
    num_response_tokens: torch.Tensor,
    row_index: torch.Tensor | None = None,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: torch.Tensor | None = None,
    implementation: Name = "auto",
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """D_i = mean of (log_probs - old_log_probs) over response tokens: log of the sequence ratio.

    Args:
        hidden: [T, H]; of this context-parallel rank's positions.
        weight: [V_local, H].
        labels: [R]; R = response tokens on this context-parallel rank.
        old_log_probs: [R] of the policy that generated the batch; no gradient flows into it.
        sequence_ids: [R] int64 in 0..num_sequences-1.
        num_sequences: B.
        num_response_tokens: [B] int64, over all context-parallel ranks. 0 gives D = 0.
        row_index: [R] as in `token_log_probs`, like all up to `cp_group`.
        temperature: of the logits.
        vocab_start: token id of the first row of `weight`.
        vocab_size: real tokens over all ranks.
        tp_group: ranks that hold the other shards of the vocabulary.
        sequence_parallel: `hidden` is sharded over `tp_group` by positions.
        main_grad: what the gradient of `weight` is added to.
        implementation: of the operator.
        cp_group: ranks that hold the other tokens of the same sequences.

    Returns:
        D [B] float64 with autograd, the same on every rank of both groups, and this rank's
        log-probs [R] (detached). Each context-parallel rank's gradients are those of its own rows:
        sum them.

    Collectives: those of `token_log_probs`, then one all-reduce of [B] over `cp_group`, also if
        R = 0.

    Raises:
        ValueError, DivergenceError: as `token_log_probs`; and for `old_log_probs`, `sequence_ids`
            and `num_response_tokens`, naming row or sequence. On this context-parallel rank alone:
            the launcher ends the others.

    Source: equation (gspo_ratio), log of the geometric mean of the token ratios.
    """
    _check_sequences(labels, old_log_probs, sequence_ids, num_sequences, num_response_tokens)
    log_probs = token_log_probs(
        hidden,
        weight,
        labels,
        row_index=row_index,
        temperature=temperature,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        implementation=implementation,
    )
    assert isinstance(log_probs, torch.Tensor)
    difference = log_probs.double() - old_log_probs.detach().double()
    log_ratio = segment_mean(difference, sequence_ids, num_sequences, num_response_tokens)
    if cp_group is not None:
        log_ratio = _SumOverRanks.apply(log_ratio, cp_group)
    return log_ratio, log_probs.detach()


def _check_sequences(
    labels: torch.Tensor,
    old_log_probs: torch.Tensor,
    sequence_ids: torch.Tensor,
    num_sequences: int,
    num_response_tokens: torch.Tensor,
) -> None:
    if old_log_probs.shape != labels.shape or sequence_ids.shape != labels.shape:
        raise ValueError(
            f"old_log_probs {tuple(old_log_probs.shape)} and sequence_ids "
            f"{tuple(sequence_ids.shape)} must have one entry per label {tuple(labels.shape)}"
        )
    for name, tensor in (
        ("sequence_ids", sequence_ids),
        ("num_response_tokens", num_response_tokens),
    ):
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} ({tensor.dtype}) must be torch.int64")
    if num_response_tokens.shape != (num_sequences,):
        raise ValueError(
            f"num_response_tokens {tuple(num_response_tokens.shape)} must be [{num_sequences}]"
        )
    outside = (sequence_ids < 0) | (sequence_ids >= num_sequences)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"sequence_ids[{row}] ({int(sequence_ids[row])}) must be in 0..{num_sequences - 1}"
        )
    counts = segment_counts(sequence_ids, num_sequences=num_sequences)
    if bool((counts > num_response_tokens).any()):
        sequence = int((counts > num_response_tokens).nonzero()[0])
        raise ValueError(
            f"num_response_tokens[{sequence}] ({int(num_response_tokens[sequence])}) must be at "
            f"least its {int(counts[sequence])} rows here"
        )
    finite = old_log_probs.isfinite()
    if not bool(finite.all()):
        raise DivergenceError(f"old_log_probs[{int((~finite).nonzero()[0])}] is not finite")


def segment_mean(
    values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, counts: torch.Tensor
) -> torch.Tensor:
    """Mean of `values` [T] by sequence, in float64, in a fixed order of summation.

    Args:
        values: [T], with autograd.
        sequence_ids: [T] int64 in 0..num_sequences-1.
        num_sequences: B.
        counts: [B] int64, what each sum is divided by (all tokens of the sequence, here or not).

    Returns:
        [B] float64; zero for a sequence whose count is 0.
    """
    return segment_sum(values, sequence_ids, num_sequences=num_sequences) / counts.clamp(min=1)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the identity: every rank computes the same loss from the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
