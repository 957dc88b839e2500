"""The two computations of the log-prob operator in torch, tile by tile of the logits.

For CPUs and any GPU. Shapes: R rows (response tokens), H hidden size, V columns of this vocabulary
shard that are real tokens; z is a tile of logits divided by the temperature, in the accumulation
dtype: float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gapo_megatron.compat import onednn
from gapo_megatron.device import float32_products

MAXIMUM, SUM_EXP, TARGET, WEIGHTED = range(4)
"""Rows of a statistics tensor [3 or 4, R], with z the logits divided by the temperature:
m = max z; sum exp(z - m); z[label], or 0 where the label is not in it; sum exp(z - m) (z - m)."""

CPU_ROWS = 192
"""Rows of every product of the forward pass on a CPU.

A BLAS library chooses kernels, and with them the rounding, by the number of rows. MKL's compute 4,
6 or 16 rows at a time, and what is left over with another kernel: a multiple of all three leaves
nothing over. oneDNN's keep a row's bits at this number, too. Smaller ones are slower.
"""

KEPT_BYTES = 2**28
"""Most logits that a forward pass on a CPU keeps for its backward pass."""


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


def row_multiple(hidden: torch.Tensor) -> int:
    """Number of which `softmax_stats` needs a multiple of rows, so that bits do not depend on R.

    On a CPU all products then have one size (docs/numerics.md, batch invariance).
    """
    return CPU_ROWS if hidden.device.type == "cpu" else 16


def block_shape(weight: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of a `grad_logits` call; independent of the number of rows."""
    num_rows, num_columns = _tile_shape(weight)
    return num_rows * max(8, -(-4096 // num_rows)), num_columns


def room_for_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Room for the logits of as many of the first rows as `KEPT_BYTES` hold, on a CPU.

    There the backward pass would take a third longer if it computed them again.

    Returns:
        [R_k, V] in the accumulation dtype, R_k <= R (`kept_tile` is a tile of it); None: no room.
    """
    if hidden.device.type != "cpu" or not len(weight):
        return None
    num_rows, _ = _tile_shape(weight)
    dtype = accumulation_dtype(hidden.dtype)
    fitting = min(len(hidden), KEPT_BYTES // (dtype.itemsize * len(weight)))
    kept = fitting // num_rows * num_rows
    return torch.empty((kept, len(weight)), dtype=dtype) if kept else None


def kept_tile(kept: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """[R_k, V_v] contiguous: columns start..stop-1 of kept logits, which lie tile by tile."""
    return kept.view(-1)[len(kept) * start : len(kept) * stop].view(len(kept), stop - start)


def softmax_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    *,
    inverse_temperature: float,
    with_entropy: bool,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Statistics of every row over this shard's columns.

    Args:
        hidden: [R, H], R a multiple of `row_multiple`.
        weight: [V, H]; V may be 0 (a shard of padding only).
        columns: [R] int64, the label's column in this shard; outside 0..V-1 if it is in another.
        inverse_temperature: factor of the logits.
        with_entropy: whether to compute the row WEIGHTED.
        kept: `room_for_logits`, which receives z of its rows.

    Returns:
        [3 or 4, R] in the accumulation dtype; rows as `MAXIMUM` and the others number them. No
        collectives.
    """
    num_stats = 4 if with_entropy else 3
    dtype = accumulation_dtype(hidden.dtype)
    stats = torch.zeros((num_stats, len(hidden)), dtype=dtype, device=hidden.device)
    stats[MAXIMUM] = -torch.inf
    num_rows, num_columns = _tile_shape(weight)
    with _exact_products(hidden):
        for tile in _slices(len(weight), num_columns):
            w_v = _operand(weight[tile])
            kept_v = None if kept is None else kept_tile(kept, tile.start, tile.stop)
            for rows in _slices(len(hidden), num_rows):
                out = kept_v[rows] if kept_v is not None and rows.stop <= len(kept_v) else None
                z = _logits(_operand(hidden[rows]), w_v, inverse_temperature, out=out)
                columns_v = columns[rows] - tile.start
                stats_v = _tile_stats(z, columns_v, num_stats, overwrite=out is None)
                stats[:, rows] = merge_stats(stats[:, rows], stats_v)
    return stats


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
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradient of the logits of a block of rows and a tile of columns; recomputes these logits.

    With m the maximum, p = exp(z - m) inverse_sum, y the label, h the entropy, g and e the
    gradients of log-probability and entropy:

        dz = (g (1[column = y] - p) - e p (log p + h)) / temperature

    Args:
        hidden: [R_b, H], at most `block_shape`.
        weight: [V_v, H] the tile's rows of the output layer.
        columns: [R_b] int64, the label's column in the tile; outside 0..V_v-1 if elsewhere.
        inverse_temperature: factor of the logits.
        maximum: [R_b] over all shards, in the accumulation dtype like all that follow.
        inverse_sum: [R_b] 1 / sum exp(z - m) over all shards.
        grad_log_probs: [R_b] g.
        entropy: [R_b] h; None together with `grad_entropy`.
        grad_entropy: [R_b] e.
        kept: z of some rows [R_k, V_v] (`kept_tile`), and which of them are the block's first rows
            (int64, at most R_b): they are not recomputed.

    Returns:
        dz [R_b, V_v] in hidden's dtype, computed in the accumulation dtype and rounded once; and
        what the rounding took from each row's sum over the tile, [R_b] in the accumulation dtype
        (None where nothing is rounded).
    """
    dz = torch.empty((len(hidden), len(weight)), dtype=hidden.dtype, device=hidden.device)
    num_rows, _ = _tile_shape(weight)
    g = grad_log_probs * inverse_temperature
    e = None if grad_entropy is None else grad_entropy * inverse_temperature
    lost = torch.zeros_like(g) if dz.dtype != g.dtype else None
    with _exact_products(hidden):
        w_v = _operand(weight)
        for rows in _slices(len(hidden), num_rows):
            # In the memory of dz if nothing is rounded.
            out = dz[rows] if lost is None else None
            if kept is not None and rows.stop <= len(kept[1]):
                z = torch.index_select(kept[0], 0, kept[1][rows], out=out)
            else:
                z = _logits(_operand(hidden[rows]), w_v, inverse_temperature, out=out)
            dz_b = _grad_logits_(
                z.sub_(maximum[rows, None]),
                columns[rows],
                inverse_sum[rows],
                g[rows],
                None if entropy is None else entropy[rows],
                None if e is None else e[rows],
            )
            if lost is not None:
                dz[rows] = dz_b
                lost[rows] = dz_b.sub_(dz[rows]).sum(dim=1)
    return dz, lost


def add_product_(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, overwrite: bool = False
) -> None:
    """Add left [M, K] @ right [K, N] to total [M, N], accumulated at least in float32.

    The factors have the same dtype; total has it, too, or the accumulation dtype. With `overwrite`
    total becomes the product, whatever it held.
    """
    beta = 0 if overwrite else 1  # with 0 total is not read: it may hold NaN
    left_wide, right_wide = _operand(left), _operand(right)
    with _exact_products(left):
        if left.is_cuda and left.dtype == total.dtype and total.dtype.itemsize == 2:
            # In two steps: within one, cuBLAS may add partial sums in 16 bits.
            product = torch.mm(left, right, out_dtype=torch.float32)
            total.copy_(product) if overwrite else total.add_(product)
        elif (sums := onednn.mm(left_wide, right_wide)) is not None:
            total.copy_(sums) if overwrite else total.add_(sums)
        elif left.dtype == total.dtype:
            total.addmm_(left, right, beta=beta)
        elif total.is_cuda:
            torch.addmm(total, left, right, beta=beta, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(left_wide, right_wide, beta=beta)


def _tile_stats(
    z: torch.Tensor, columns: torch.Tensor, num_stats: int, *, overwrite: bool
) -> torch.Tensor:
    """Statistics [num_stats, R] of one tile; `overwrite`: z's memory may be used."""
    target = z.gather(1, columns.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    target = torch.where((columns >= 0) & (columns < z.shape[1]), target, 0)
    maximum = z.amax(dim=1)
    z = z.sub_(maximum[:, None]) if overwrite else z - maximum[:, None]
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


def _slices(size: int, step: int) -> Iterator[slice]:
    """Slices of 0..size of length `step`, in a fixed order."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _tile_shape(weight: torch.Tensor) -> tuple[int, int]:
    """(rows, columns): 1.5 MiB of logits on a CPU, 64 MiB on a GPU; independent of R."""
    if weight.device.type == "cpu":
        return CPU_ROWS, 2048
    return 2**24 // max(min(8192, len(weight)), 64), 8192


def _exact_products(hidden: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Compute float32 products in full precision.

    For bfloat16 on a CPU, float32 copies are multiplied with bfloat16 instructions. This is exact,
    because the copies hold bfloat16 values and sums stay in float32.
    """
    is_bfloat16 = hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16
    return float32_products(hidden.device, "bf16" if is_bfloat16 else "ieee")


def _operand(matrix: torch.Tensor) -> torch.Tensor:
    """Operand of a product: unchanged on CUDA, which accumulates 16 bits in float32; else cast."""
    return matrix if matrix.is_cuda else matrix.to(accumulation_dtype(matrix.dtype))


def _logits(
    x_b: torch.Tensor,
    w_v: torch.Tensor,
    inverse_temperature: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [rows, columns] in the accumulation dtype; both passes call this same function."""
    dtype = accumulation_dtype(x_b.dtype)
    if (sums := onednn.mm(x_b, w_v.t())) is not None:
        z = sums if out is None else out.copy_(sums)
    elif x_b.dtype == dtype:
        z = torch.mm(x_b, w_v.t(), out=out)
    else:
        z = torch.mm(x_b, w_v.t(), out_dtype=dtype)
    return z if inverse_temperature == 1 else z.mul_(inverse_temperature)
