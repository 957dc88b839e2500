"""The reduction behind the vocabulary tiles: from log-probs of rows to one number per sequence.

Sums run by offsets, in float64, and each sequence's rows in their order. So a sequence's result
depends on its own rows only: it has the same bits in every micro-batch and parallel layout.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class Sequences:
    """The B sequences to which T rows (response tokens) of a micro-batch belong.

    The results of its methods are float64, with autograd, local to the micro-batch (all tensor and
    context parallel ranks compute the same). Nothing waits for the device.
    """

    ids: Tensor
    """[T] int64 in 0..B-1: the sequence of each row."""
    offsets: Tensor
    """[B + 1] int64: sequence i has rows offsets[i]..offsets[i + 1] - 1, counted in `order`."""
    order: Tensor | None = None
    """[T] int64: the rows, sequence by sequence; None: they are in this order already."""
    implementation: Literal["torch", "triton"] = "torch"
    """Implementation, the tiles' (`implementation.choose_together`)."""

    @classmethod
    def of(cls, ids: Tensor | Sequences, num_sequences: int) -> Sequences:
        """From `ids` in any order, which are sorted; a `Sequences` is returned as it is."""
        if isinstance(ids, Sequences):
            return ids
        counts = torch.zeros(num_sequences, dtype=torch.int64, device=ids.device)
        counts.index_add_(0, ids, torch.ones_like(ids))
        order = torch.argsort(ids, stable=True) if len(ids) else None
        return cls(ids, F.pad(counts.cumsum(0), (1, 0)), order)

    def group(self, cells: Tensor, num_cells: int) -> Sequences:
        """Sequences as rows of `num_cells` cells: [B] int64 in 0..num_cells-1, in any order."""
        return replace(Sequences.of(cells, num_cells), implementation=self.implementation)

    @functools.cached_property
    def counts(self) -> Tensor:
        """[B] int64: number of rows of each sequence."""
        return self.offsets.diff()

    def sum(self, values: Tensor) -> Tensor:
        """[B, ...] sums of `values` [T, ...]; zero for a sequence without rows."""
        return _Reduce.apply(values, None, self, False)

    def mean(self, values: Tensor) -> Tensor:
        """[B] means of `values` [T]; zero for a sequence without rows."""
        return _Reduce.apply(values, None, self, True)

    def log_ratio(self, log_probs: Tensor, old_log_probs: Tensor, *, mean: bool = True) -> Tensor:
        """D [B], the mean of log_probs - old_log_probs over a sequence's rows, or their sum.

        Args:
            log_probs: [T] float32 or float64, with autograd.
            old_log_probs: [T] likewise; no gradient flows into it.
            mean: divide by the number of rows (0 for a sequence without rows).
        """
        minus = old_log_probs.detach()
        return _Reduce.apply(log_probs, minus, self, mean)


class _Reduce(torch.autograd.Function):
    """Sum or mean [B, ...] float64 of values - minus [T, ...] over each sequence's rows."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, minus: Tensor | None, sequences: Sequences, mean: bool
    ) -> Tensor:
        # The kernels read by offsets and check no bounds.
        assert len(values) == len(sequences.ids) and (minus is None or minus.shape == values.shape)
        ctx.sequences, ctx.mean, ctx.dtype = sequences, mean, values.dtype
        num_sequences, rest = len(sequences.offsets) - 1, values.shape[1:]
        if not len(values) or not num_sequences:  # no kernel is given nothing to do
            return values.new_zeros((num_sequences, *rest), dtype=torch.float64)
        if sequences.implementation == "triton":
            from gapo_megatron.logprob import triton_sequences

            total: Tensor = triton_sequences.reduce(values, minus, sequences, mean=mean)
            return total
        values = values.double()
        if minus is not None:
            values = values - minus.double()
        if sequences.order is not None:
            values = values[sequences.order]
        # Unlike `index_add` on a GPU, which adds in the order in which threads arrive. Always of
        # two dimensions, of which a thread adds one sequence's rows one by one: of one dimension a
        # GPU reads several rows at once, if a sequence begins at an aligned address, and adds in an
        # order that depends on it, that is, on what is packed before.
        total = torch.segment_reduce(
            values.reshape(len(values), -1),
            "sum",
            offsets=sequences.offsets,
            unsafe=True,
            initial=0,
        ).reshape(-1, *rest)
        return total / sequences.counts.clamp(min=1) if mean else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sequences: Sequences = ctx.sequences
        if not len(sequences.ids):
            return grad.new_zeros((0, *grad.shape[1:]), dtype=ctx.dtype), None, None, None
        if sequences.implementation == "triton":
            from gapo_megatron.logprob import triton_sequences

            by_row = triton_sequences.spread(grad, sequences, mean=ctx.mean, dtype=ctx.dtype)
            return by_row, None, None, None
        if ctx.mean:
            grad = grad / sequences.counts.clamp(min=1)
        return grad.to(ctx.dtype)[sequences.ids], None, None, None  # rounded once
