"""Row blocks x vocabulary tiles: the only place where logits exist, one tile at a time.

Shapes: R rows (response tokens), H hidden size, V columns of this vocabulary shard that are real
tokens; suffix _b: a block of rows, _v: a tile of columns. z is a tile of logits divided by the
temperature, in the accumulation dtype: float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

ROW_MULTIPLE = 16
"""Rows are zero-padded to a multiple of this: BLAS libraries have kernels of their own,
with another rounding, for a handful of rows (docs/numerics.md, batch invariance)."""

MAXIMUM, SUM_EXP, TARGET, WEIGHTED = range(4)
"""Rows of a statistics tensor, which describes the softmax of each row over a set of columns:
m = max z; sum exp(z - m); z[label], or 0 where the label is not in it; sum exp(z - m) (z - m)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of logits, statistics and gradient sums for inputs of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def softmax_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    *,
    inverse_temperature: float,
    with_entropy: bool,
) -> torch.Tensor:
    """Statistics of every row over this shard's columns.

    Args:
        hidden: [R, H].
        weight: [V, H]; V may be 0 (a shard of padding only).
        columns: [R] int64, the label's column here; outside 0..V-1 if another shard owns it.
        inverse_temperature: factor of the logits.
        with_entropy: whether to compute the row WEIGHTED.

    Returns:
        [3 or 4, R] in the accumulation dtype. No collectives.
    """
    num_stats = 4 if with_entropy else 3
    num_rows = len(hidden)
    hidden, columns = _pad_rows(hidden), _pad_rows(columns)
    stats = hidden.new_zeros((num_stats, len(hidden)), dtype=accumulation_dtype(hidden.dtype))
    stats[MAXIMUM] = -torch.inf
    for rows in _row_blocks(hidden, weight):
        x_b, columns_b = _operand(hidden[rows]), columns[rows]
        stats_b = [
            _tile_stats(_logits(x_b, w_v, inverse_temperature), columns_b - tile.start, num_stats)
            for tile, w_v in _vocab_tiles(weight)
        ]
        if stats_b:
            stats[:, rows] = functools.reduce(merge_stats, stats_b)
    return stats[:, :num_rows].contiguous()


def merge_stats(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Statistics [3 or 4, R] over the union of two disjoint sets of columns, either maybe empty."""
    maximum = torch.maximum(first[MAXIMUM], second[MAXIMUM])
    merged = torch.zeros_like(first)
    merged[MAXIMUM] = maximum
    for part in (first, second):
        # An empty set has m = -inf and sums of 0, which any finite shift leaves at 0.
        shift = torch.where(part[MAXIMUM] == -torch.inf, 0, part[MAXIMUM] - maximum)
        scale = shift.exp()
        merged[SUM_EXP] += scale * part[SUM_EXP]
        merged[TARGET] += part[TARGET]
        if len(merged) > WEIGHTED:
            merged[WEIGHTED] += scale * (part[WEIGHTED] + shift * part[SUM_EXP])
    return merged


def gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    *,
    maximum: torch.Tensor,
    sum_exp: torch.Tensor,
    grad_log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    inverse_temperature: float,
    hidden_needs_grad: bool,
    grad_weight: torch.Tensor | None,
) -> torch.Tensor | None:
    """Gradients of log-probs and entropies, from logits computed anew, tile by tile.

    With p = exp(z - m) / sum_exp over all shards, y the label, h the entropy, g and e the
    gradients of log-probability and entropy:

        dz = g (1[column = y] - p) - e p (log p + h)

    Args:
        hidden: [R, H], the rows whose g or e is not zero.
        weight: [V, H] as in `softmax_stats`.
        columns: [R] likewise.
        maximum: [R] over all shards.
        sum_exp: [R] over all shards.
        grad_log_probs: [R] g.
        entropy: [R] h; None together with `grad_entropy`.
        grad_entropy: [R] e.
        inverse_temperature: as in `softmax_stats`.
        hidden_needs_grad: whether to compute dX.
        grad_weight: [V, H] in the accumulation dtype; dW of these rows is added. None: not needed.

    Returns:
        dX [R, H] in the accumulation dtype: this shard's share, still to be summed over shards.
    """
    num_rows = len(hidden)
    hidden, columns, m, g = map(_pad_rows, (hidden, columns, maximum, grad_log_probs))
    # 1, not 0, in the padding: its rows then stay finite, and with g = e = 0 add exact zeros.
    inverse_sum = _pad_rows(sum_exp.reciprocal(), value=1)
    e = None if grad_entropy is None else _pad_rows(grad_entropy)
    h = None if entropy is None else _pad_rows(entropy)
    grad_hidden = torch.zeros(
        hidden.shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device
    )
    for rows in _row_blocks(hidden, weight):
        x_b = _operand(hidden[rows])
        for tile, w_v in _vocab_tiles(weight):
            dz = _grad_logits_(
                _logits(x_b, w_v, inverse_temperature).sub_(m[rows, None]),
                columns[rows] - tile.start,
                inverse_sum[rows],
                g[rows] * inverse_temperature,
                None if h is None else h[rows],
                None if e is None else e[rows] * inverse_temperature,
            ).to(x_b.dtype)
            if hidden_needs_grad:
                _add_product_(grad_hidden[rows], dz, w_v)
            if grad_weight is not None:
                _add_product_(grad_weight[tile], dz.t(), x_b)
    return grad_hidden[:num_rows] if hidden_needs_grad else None


def _tile_stats(z: torch.Tensor, columns: torch.Tensor, num_stats: int) -> torch.Tensor:
    """Statistics [num_stats, R] of one tile; overwrites z."""
    target = z.gather(1, columns.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    target = torch.where((columns >= 0) & (columns < z.shape[1]), target, 0)
    maximum = z.amax(dim=1)
    z.sub_(maximum[:, None])
    if num_stats <= WEIGHTED:
        return torch.stack([maximum, z.exp_().sum(dim=1), target])
    exp = z.exp()
    return torch.stack([maximum, exp.sum(dim=1), target, exp.mul_(z).sum(dim=1)])


def _grad_logits_(
    z: torch.Tensor,
    columns: torch.Tensor,
    inverse_sum: torch.Tensor,
    g: torch.Tensor,
    h: torch.Tensor | None,
    e: torch.Tensor | None,
) -> torch.Tensor:
    """Compute g (1[column = label] - p) - e p (log p + h) from z - m, in z's memory."""
    if h is None or e is None:
        dz = z.exp_().mul_((-g * inverse_sum)[:, None])
    else:
        p = z.exp().mul_(inverse_sum[:, None])
        # log p = (z - m) + log inverse_sum
        offset = g + e * (h + inverse_sum.log())
        dz = z.mul_(e[:, None]).add_(offset[:, None]).mul_(p).neg_()
    here = (columns >= 0) & (columns < z.shape[1])
    index = columns.clamp(0, z.shape[1] - 1)[:, None]
    return dz.scatter_add_(1, index, torch.where(here, g, 0)[:, None])


def _row_blocks(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    num_rows, _ = _tile_shape(weight)
    for start in range(0, len(hidden), num_rows):
        yield slice(start, min(start + num_rows, len(hidden)))


def _vocab_tiles(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (columns, operand [columns, H]) of every tile, always in the same order."""
    _, num_columns = _tile_shape(weight)
    for start in range(0, len(weight), num_columns):
        tile = slice(start, min(start + num_columns, len(weight)))
        yield tile, _operand(weight[tile])


def _tile_shape(weight: torch.Tensor) -> tuple[int, int]:
    """(rows, columns): 4 MiB of logits on CPU, 128 MiB on an accelerator, never a function of R."""
    size, num_columns = (2**20, 2048) if weight.device.type == "cpu" else (2**25, 8192)
    return size // max(min(num_columns, len(weight)), 64), num_columns


def _pad_rows(values: torch.Tensor, *, value: float = 0) -> torch.Tensor:
    padding = -len(values) % ROW_MULTIPLE
    return (
        F.pad(values, (0, 0) * (values.dim() - 1) + (0, padding), value=value)
        if padding
        else values
    )


def _operand(matrix: torch.Tensor) -> torch.Tensor:
    """What enters a product: bfloat16 on CUDA, which multiplies it into float32; else float32."""
    return matrix if matrix.is_cuda else matrix.to(accumulation_dtype(matrix.dtype))


def _logits(x_b: torch.Tensor, w_v: torch.Tensor, inverse_temperature: float) -> torch.Tensor:
    """[rows, columns] in the accumulation dtype. Forward and backward call this very function."""
    dtype = accumulation_dtype(x_b.dtype)
    z = x_b @ w_v.t() if x_b.dtype == dtype else torch.mm(x_b, w_v.t(), out_dtype=dtype)
    return z if inverse_temperature == 1 else z.mul_(inverse_temperature)


def _add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right, accumulated in total's dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)
