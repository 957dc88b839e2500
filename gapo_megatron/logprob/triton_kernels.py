"""The two computations of the operator as Triton kernels for Hopper; an alternative to `tiles`.

The forward kernel sweeps a part of the vocabulary for one block of rows and keeps each row's
statistics in registers. The backward kernel recomputes a tile of logits and writes its gradient.
Both get their logits from `logits_tile`, with the same tile shape, order of summation and no fused
rounding, so both see the same probabilities. A row's arithmetic does not depend on the number of
rows: tiles and parts depend on vocabulary and architecture only.

It has run only in Triton's interpreter (float32 and float16); for GPUs it was compiled, not run. So
`auto` uses it only if `self_check` passes.

Shapes: R rows, H hidden size, V columns of this shard. Matrices are accessed through descriptors:
elements outside read as zero and are not written.
"""

import functools
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from gapo_megatron.compat.triton import TensorDescriptor, is_interpreted
from gapo_megatron.logprob.tiles import MAXIMUM, WEIGHTED, merge_stats
from gapo_megatron.logprob.triton_tile import (
    finite,
    label_columns,
    logits_tile,
    next_label,
    store_grad,
)

MAX_SPLITS = 8
"""Shares of the vocabulary in the forward pass: 132 processors then work at 16 blocks of rows and
8 places of the vocabulary, which lie in the L2 cache together."""

ROW_BLOCKS_PER_GROUP = 16
"""Blocks of rows that go through the columns side by side in the backward pass, for that reason."""


class _Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    """Elements of H per step of the sum."""
    num_warps: int
    num_stages: int
    """Steps whose operands lie in shared memory."""

    def options(self) -> dict[str, int]:
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            # A product fused into a sum in one kernel alone would round the logits differently.
            "enable_fp_fusion": False,
        }


# By major compute capability (0: the interpreter) and bytes per element. Nothing is tuned at run
# time: a choice by timing would change the bits of a row from run to run.
_TILES = {
    (9, 2): _Tile(128, 256, 64, num_warps=8, num_stages=4),
    (9, 4): _Tile(64, 64, 16, num_warps=4, num_stages=3),
    (0, 2): _Tile(16, 32, 16, num_warps=1, num_stages=1),
    (0, 4): _Tile(16, 32, 16, num_warps=1, num_stages=1),
}


def row_multiple(hidden: torch.Tensor) -> int:
    """Rows need no padding: a block of rows is always computed whole."""
    return 1


def block_shape(weight: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of a block of `grad_logits`: at most 256 MiB of bfloat16, for any H."""
    return 16384, 8192


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
        hidden: [R, H] bfloat16, float16 or float32, H a multiple of 16 bytes.
        weight: [V, H] likewise; V may be 0 (a shard of padding only).
        columns: [R] int64, the label's column here; outside 0..V-1 if another shard owns it.
        inverse_temperature: factor of the logits.
        with_entropy: whether to compute the row WEIGHTED.

    Returns:
        [3 or 4, R] float32, as in `tiles`. No collectives.

    Raises:
        ValueError: H is not a multiple of 16 bytes, or weight's rows are not laid out as such.
    """
    num_stats = WEIGHTED + 1 if with_entropy else WEIGHTED
    (num_rows, hidden_size), num_columns = hidden.shape, len(weight)
    tile = _tile(hidden)
    num_splits = min(MAX_SPLITS, triton.cdiv(num_columns, tile.columns))
    if not num_rows or not num_splits:
        stats = hidden.new_zeros((num_stats, num_rows), dtype=torch.float32)
        stats[MAXIMUM] = -torch.inf
        return stats
    parts = hidden.new_empty((num_splits, num_stats, num_rows), dtype=torch.float32)
    hidden = hidden.contiguous()
    _stats_kernel[(num_splits, triton.cdiv(num_rows, tile.rows))](
        _descriptor(hidden, "hidden", tile.rows, tile.depth),
        _descriptor(weight, "weight", tile.columns, tile.depth),
        columns.contiguous(),
        parts,
        num_rows,
        num_columns,
        hidden_size,
        inverse_temperature,
        WITH_ENTROPY=with_entropy,
        **tile.options(),
    )
    return functools.reduce(merge_stats, parts.unbind())


def grad_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    *,
    inverse_temperature: float,
    maximum: torch.Tensor,
    inverse_sum: torch.Tensor,
    grad_log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradient of the logits of a block of rows and a tile of columns, which it computes anew.

    With m the maximum, p = exp(z - m) inverse_sum, y the label, h the entropy, g and e the
    gradients of log-probability and entropy:

        dz = (g (1[column = y] - p) - e p (log p + h)) / temperature

    Args:
        hidden: [R_b, H] as in `softmax_stats`.
        weight: [V_v, H] the tile's rows of the output layer; R_b and V_v are positive.
        columns: [R_b] int64, the label's column in the tile; outside 0..V_v-1 if elsewhere.
        inverse_temperature: factor of the logits.
        maximum: [R_b] over all shards, float32 like all that follow.
        inverse_sum: [R_b] 1 / sum exp(z - m) over all shards.
        grad_log_probs: [R_b] g.
        entropy: [R_b] h; None together with `grad_entropy`.
        grad_entropy: [R_b] e.

    Returns:
        dz [R_b, V_v] in hidden's dtype, computed in float32 and rounded once, in rows 16 bytes
        aligned; exactly 0 where g = e = 0, whatever else the row holds. And what the rounding took
        from each row's sum over the tile, [R_b] float32 (None for float32). No collectives.

    Raises:
        ValueError: as in `softmax_stats`.
    """
    (num_rows, hidden_size), num_columns = hidden.shape, len(weight)
    tile = _tile(hidden)
    row_blocks = triton.cdiv(num_rows, tile.rows)
    column_tiles = triton.cdiv(num_columns, tile.columns)
    per_16_bytes = 16 // hidden.element_size()
    dz = hidden.new_empty((num_rows, triton.cdiv(num_columns, per_16_bytes) * per_16_bytes))
    dz = dz[:, :num_columns]
    lost = None
    if dz.dtype != torch.float32:  # one sum per tile of the kernel, and zeros for the tree below
        lost = maximum.new_zeros((triton.next_power_of_2(column_tiles), num_rows))
    by_row = (columns, maximum, inverse_sum, grad_log_probs, entropy, grad_entropy)
    group = min(row_blocks, ROW_BLOCKS_PER_GROUP)
    hidden = hidden.contiguous()
    _grad_kernel[(group, column_tiles, triton.cdiv(row_blocks, group))](
        _descriptor(hidden, "hidden", tile.rows, tile.depth),
        _descriptor(weight, "weight", tile.columns, tile.depth),
        _descriptor(dz, "dz", tile.rows, tile.columns // 2),
        lost,
        *(None if values is None else values.contiguous() for values in by_row),
        num_rows,
        num_columns,
        hidden_size,
        inverse_temperature,
        **tile.options(),
    )
    if lost is None:
        return dz, None
    while len(lost) > 1:  # a tree: torch.sum would choose its order by the number of rows
        lost = lost[::2] + lost[1::2]
    return dz, lost[0]


def _tile(hidden: torch.Tensor) -> _Tile:
    major = 0
    if hidden.is_cuda:
        major, _ = torch.cuda.get_device_capability(hidden.device)
    else:
        assert is_interpreted(), f"hidden on {hidden.device}, without the interpreter"
        # It would multiply their bit patterns, as integers.
        assert hidden.dtype != torch.bfloat16, "Triton's interpreter has no product of bfloat16"
    return _TILES[major, hidden.element_size()]


def _descriptor(matrix: torch.Tensor, name: str, rows: int, columns: int) -> TensorDescriptor:
    row_bytes = matrix.stride(0) * matrix.element_size()
    if matrix.stride(1) != 1 or row_bytes % 16 or matrix.data_ptr() % 16:
        raise ValueError(
            f"{name}: rows must be contiguous and start at multiples of 16 bytes; {matrix.dtype} "
            f"{tuple(matrix.shape)} has strides {matrix.stride()} from address {matrix.data_ptr()}"
        )
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@triton.jit(do_not_specialize=["num_rows"])
def _stats_kernel(
    hidden: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    columns: tl.tensor,
    stats: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    hidden_size: tl.tensor,
    inverse_temperature: tl.tensor,
    WITH_ENTROPY: tl.constexpr,
) -> None:
    BLOCK_M: tl.constexpr = hidden.block_shape[0]
    BLOCK_N: tl.constexpr = weight.block_shape[0]
    # Programs start along the splits first: those at work share a few blocks of rows and sweep
    # their shares of the vocabulary in step, so that a weight is read from memory once for all.
    split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    row = tl.program_id(1) * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    label = label_columns(columns, rows, num_rows, num_columns)

    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    sum_exp = tl.zeros((BLOCK_M,), dtype=tl.float32)
    target = tl.zeros((BLOCK_M,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_M,), dtype=tl.float32)
    num_tiles = tl.cdiv(num_columns, BLOCK_N)
    first_tile = split * num_tiles // num_splits
    next_column = next_label(label, first_tile * BLOCK_N, num_columns)
    for tile in range(first_tile, (split + 1) * num_tiles // num_splits):
        column = tile * BLOCK_N
        z = logits_tile(
            hidden,
            weight,
            row,
            column,
            num_columns,
            hidden_size,
            inverse_temperature,
        )
        if next_column < column + BLOCK_N:
            is_label = column + tl.arange(0, BLOCK_N)[None, :] == label[:, None]
            target += tl.sum(tl.where(is_label, z, 0.0), axis=1)
            next_column = next_label(label, column + BLOCK_N, num_columns)
        new_m = tl.maximum(m, tl.max(z, axis=1))
        # Distances are from a finite number even while all logits are -inf; until then the sums
        # are 0, which any finite shift leaves at 0.
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        shift = tl.where(m == float("-inf"), 0.0, m - base)
        scale = tl.exp(shift)
        distance = z - base[:, None]
        exp = tl.exp(distance)
        if WITH_ENTROPY:
            product = exp * finite(distance)
            weighted = scale * (weighted + shift * sum_exp) + tl.sum(product, axis=1)
        sum_exp = scale * sum_exp + tl.sum(exp, axis=1)
        m = new_m

    # In the order of `tiles.MAXIMUM` and its like.
    num_stats: tl.constexpr = 4 if WITH_ENTROPY else 3
    out = stats + split * num_stats * num_rows + rows
    inside = rows < num_rows
    tl.store(out, m, mask=inside)
    tl.store(out + num_rows, sum_exp, mask=inside)
    tl.store(out + 2 * num_rows, target, mask=inside)
    if WITH_ENTROPY:
        tl.store(out + 3 * num_rows, weighted, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _grad_kernel(
    hidden: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    dz: tl.tensor_descriptor,
    lost: tl.tensor,
    columns: tl.tensor,
    maximum: tl.tensor,
    inverse_sum: tl.tensor,
    grad_log_probs: tl.tensor,
    entropy: tl.tensor,
    grad_entropy: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    hidden_size: tl.tensor,
    inverse_temperature: tl.tensor,
) -> None:
    BLOCK_M: tl.constexpr = hidden.block_shape[0]
    BLOCK_N: tl.constexpr = weight.block_shape[0]
    # A group of row blocks takes all columns before the next group starts.
    row = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * BLOCK_M
    if row >= num_rows:
        return
    column = tl.program_id(1) * BLOCK_N
    rows = row + tl.arange(0, BLOCK_M)
    inside = rows < num_rows
    label = label_columns(columns, rows, num_rows, num_columns)
    m = tl.load(maximum + rows, mask=inside, other=0.0)
    r = tl.load(inverse_sum + rows, mask=inside, other=1.0)
    g = tl.load(grad_log_probs + rows, mask=inside, other=0.0)

    z = logits_tile(
        hidden,
        weight,
        row,
        column,
        num_columns,
        hidden_size,
        inverse_temperature,
    )
    h = None
    e = None
    is_active = g != 0
    if grad_entropy is not None:
        h = tl.load(entropy + rows, mask=inside, other=0.0)
        e = tl.load(grad_entropy + rows, mask=inside, other=0.0)
        is_active = is_active | (e != 0)
    # A row without a gradient, or a label in this tile.
    is_special = tl.min(is_active.to(tl.int32), axis=0) == 0
    is_special = is_special | (next_label(label, column, num_columns) < column + BLOCK_N)
    # Half of the columns, then the other: all of them at once need more registers than there are.
    HALF: tl.constexpr = dz.block_shape[1]
    left, right = z.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
    lost_by_row = store_grad(
        left, dz, row, column, label, m, r, g, h, e, is_active, is_special, inverse_temperature
    )
    lost_by_row += store_grad(
        right,
        dz,
        row,
        column + HALF,
        label,
        m,
        r,
        g,
        h,
        e,
        is_active,
        is_special,
        inverse_temperature,
    )
    if lost is not None:
        tl.store(lost + tl.program_id(1) * num_rows + rows, lost_by_row, mask=inside)
