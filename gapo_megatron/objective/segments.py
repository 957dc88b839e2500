"""Sums and means over the response tokens of each sequence in a packed micro-batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def segment_sum(
    values: torch.Tensor, sequence_ids: torch.Tensor, *, num_sequences: int
) -> torch.Tensor:
    """Sum `values` [T, ...] by sequence, in float64 and in a fixed order.

    A sequence's sum depends only on its own tokens, so it has the same bits in any micro-batch.
    (`index_add` on a GPU adds in the order in which threads arrive.)

    Args:
        values: [T, ...], any floating dtype; gradients flow.
        sequence_ids: [T] int64 in 0..num_sequences-1, in any order.
        num_sequences: B.

    Returns:
        [B, ...] float64; zero for a sequence without tokens.
    """
    # An extra sequence with one row of zeros, dropped at the end: no kernel sees zero rows or zero
    # sequences. (segment_reduce on a GPU divides by the first and launches a grid of the second.)
    ids = F.pad(sequence_ids, (0, 1), value=num_sequences)
    padded = F.pad(values.double(), (0, 0) * (values.dim() - 1) + (0, 1))
    order = torch.argsort(ids, stable=True)
    ends = torch.arange(num_sequences + 2, device=ids.device)
    offsets = torch.searchsorted(ids[order], ends)
    sums = torch.segment_reduce(padded[order], "sum", offsets=offsets, unsafe=True, initial=0)
    return sums[:-1]


def segment_counts(sequence_ids: torch.Tensor, *, num_sequences: int) -> torch.Tensor:
    """Tokens per sequence, [B] int64, of `sequence_ids` [T] in 0..num_sequences-1."""
    counts = torch.zeros(num_sequences, dtype=torch.int64, device=sequence_ids.device)
    return counts.index_add_(0, sequence_ids, torch.ones_like(sequence_ids))


def segment_mean(
    values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, counts: torch.Tensor
) -> torch.Tensor:
    """Mean of `values` [T] by sequence, in float64, in a fixed order of summation.

    Args:
        values: [T], with autograd.
        sequence_ids: [T] int64 in 0..num_sequences-1.
        num_sequences: B.
        counts: [B] int64, divisors of the sums.

    Returns:
        [B] float64; zero for a sequence whose count is 0.
    """
    return segment_sum(values, sequence_ids, num_sequences=num_sequences) / counts.clamp(min=1)
