"""Statistics of a row's softmax over a set of columns, and the merge of two sets."""

from __future__ import annotations

import torch

MAXIMUM, SUM_EXP, TARGET, WEIGHTED = range(4)
"""Rows of a statistics tensor [3 or 4, R], with z the logits divided by the temperature:
m = max z; sum exp(z - m); z[label], or 0 where the label is not in it; sum exp(z - m) (z - m)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of logits, statistics and gradient sums for inputs of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def merge_stats(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Merge statistics [3 or 4, R] over two disjoint sets of columns, which may be empty."""
    maximum = torch.maximum(first[MAXIMUM], second[MAXIMUM])
    merged = torch.zeros_like(first)
    merged[MAXIMUM] = maximum
    for part in (first, second):
        # An empty set has m = -inf and sums of 0, which stay 0 with any finite shift.
        shift = torch.where(part[MAXIMUM] == -torch.inf, 0, part[MAXIMUM] - maximum)
        scale = shift.exp()
        merged[SUM_EXP] += scale * part[SUM_EXP]
        merged[TARGET] += part[TARGET]
        if len(merged) > WEIGHTED:
            merged[WEIGHTED] += scale * (part[WEIGHTED] + shift * part[SUM_EXP])
    return merged
