"""Sums over the response tokens of each sequence of a packed micro-batch."""

from __future__ import annotations

import torch


def segment_sum(
    values: torch.Tensor, sequence_ids: torch.Tensor, *, num_sequences: int
) -> torch.Tensor:
    """Sum `values` [T, ...] by sequence, in float64, always in the same order.

    A sequence's sum depends on its own tokens alone, so it keeps its bits in whatever micro-batch
    it is packed. (`index_add` on a GPU adds in the order in which threads arrive.)

    Args:
        values: [T, ...], any floating dtype; gradients flow.
        sequence_ids: [T] int64 in 0..num_sequences-1, in any order.
        num_sequences: B.

    Returns:
        [B, ...] float64; zero for a sequence without tokens.
    """
    order = torch.argsort(sequence_ids, stable=True)
    ends = torch.arange(num_sequences + 1, device=sequence_ids.device)
    offsets = torch.searchsorted(sequence_ids[order], ends)
    ordered = values.double()[order]
    return torch.segment_reduce(ordered, "sum", offsets=offsets, unsafe=True, initial=0)


def segment_counts(sequence_ids: torch.Tensor, *, num_sequences: int) -> torch.Tensor:
    """Tokens per sequence, [B] int64, of `sequence_ids` [T] in 0..num_sequences-1."""
    counts = torch.zeros(num_sequences, dtype=torch.int64, device=sequence_ids.device)
    return counts.index_add_(0, sequence_ids, torch.ones_like(sequence_ids))
