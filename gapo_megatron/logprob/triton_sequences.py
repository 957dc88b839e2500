"""The two computations of `Sequences` as Triton kernels, one launch each; see `sequences._Reduce`.

A program takes one sequence, block by block of its rows from its own offset, adds in float64 in
lanes, and then adds up the lanes in a fixed tree: the order depends on the sequence's rows alone.

They have run only in Triton's interpreter; for GPUs they were compiled, not run. `self_check` tests
them together with the tiles' kernels.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from gapo_megatron.logprob.sequences import Sequences

BLOCK = 1024
"""Rows per step: a response of 16k tokens takes 16. Also the shape of the tree: never tuned."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def reduce(values: Tensor, minus: Tensor | None, sequences: Sequences, *, mean: bool) -> Tensor:
    """Sum or mean [B, ...] float64 of values - minus over each sequence's rows; T and B positive.

    Args:
        values: [T, ...] float32 or float64; [T] for a mean.
        minus: likewise; None: 0.
        sequences: the rows of each sequence.
        mean: divide by the number of rows.
    """
    num_sequences, rest = len(sequences.offsets) - 1, values.shape[1:]
    total = values.new_empty((num_sequences, *rest), dtype=torch.float64)
    _reduce_kernel[(num_sequences, rest.numel())](
        values.contiguous(),
        None if minus is None else minus.contiguous(),
        sequences.offsets.contiguous(),
        sequences.order,
        total,
        rest.numel(),
        MEAN=mean,
        BLOCK=BLOCK,
        **OPTIONS,
    )
    return total


def spread(grad: Tensor, sequences: Sequences, *, mean: bool, dtype: torch.dtype) -> Tensor:
    """Gradients [T, ...] of rows from those of sequences [B, ...] float64, rounded once."""
    num_sequences, rest = len(grad), grad.shape[1:]
    by_row = grad.new_empty((len(sequences.ids), *rest), dtype=dtype)
    _spread_kernel[(num_sequences, rest.numel())](
        grad.contiguous(),
        sequences.offsets.contiguous(),
        sequences.order,
        by_row,
        rest.numel(),
        MEAN=mean,
        BLOCK=BLOCK,
        **OPTIONS,
    )
    return by_row


@triton.jit(do_not_specialize=["width"])
def _reduce_kernel(
    values: tl.tensor,
    minus: tl.tensor,
    offsets: tl.tensor,
    order: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence, column = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    lanes = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(begin, end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < end
        if order is not None:
            rows = tl.load(order + rows, mask=inside, other=0)
        value = tl.load(values + rows * width + column, mask=inside, other=0.0).to(tl.float64)
        if minus is not None:
            place = minus + rows * width + column
            value -= tl.load(place, mask=inside, other=0.0).to(tl.float64)
        lanes += value
    result = tl.sum(lanes, axis=0)
    if MEAN:
        result /= tl.maximum(end - begin, 1).to(tl.float64)
    tl.store(total + sequence * width + column, result)


@triton.jit(do_not_specialize=["width"])
def _spread_kernel(
    grad: tl.tensor,
    offsets: tl.tensor,
    order: tl.tensor,
    by_row: tl.tensor,
    width: tl.tensor,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence, column = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
    share = tl.load(grad + sequence * width + column)
    if MEAN:
        share /= tl.maximum(end - begin, 1).to(tl.float64)
    rounded = share.to(by_row.dtype.element_ty)
    for start in range(begin, end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < end
        if order is not None:
            rows = tl.load(order + rows, mask=inside, other=0)
        tl.store(by_row + rows * width + column, rounded, mask=inside)
