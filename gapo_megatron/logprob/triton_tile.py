"""What both Triton kernels do with a tile of logits: compute it, find its labels, round it.

Every number of a tile costs an instruction of each thread for each operation, beside the matrix
products. What few tiles need is therefore behind a branch that all threads take alike: the edge of
the vocabulary, labels, rows without a gradient, a temperature other than 1. No branch changes bits:
what it leaves out would multiply by 1, add 0 or choose what is there.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from gapo_megatron.compat.triton import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def logits_tile(
    hidden: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    row: tl.tensor,
    column: tl.tensor,
    num_columns: tl.tensor,
    hidden_size: tl.tensor,
    inverse_temperature: tl.tensor,
) -> tl.tensor:
    """[BLOCK_M, BLOCK_N] float32, never rounded; -inf in columns beyond the last one."""
    BLOCK_M: tl.constexpr = hidden.block_shape[0]
    BLOCK_N: tl.constexpr = weight.block_shape[0]
    BLOCK_K: tl.constexpr = hidden.block_shape[1]
    # Else z is defined once more, as zeros, for a loop that might not run, and ptxas serialises the
    # matrix instructions (C7515; Triton 3.6).
    tl.assume(hidden_size > 0)
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, hidden_size, BLOCK_K):
        x = hidden.load([row, k])
        w = weight.load([column, k])
        z = tl.dot(x, w.T, z, input_precision="ieee")  # float32 factors are not cut to TF32
    if inverse_temperature != 1.0:
        z *= inverse_temperature
    if column + BLOCK_N > num_columns:
        is_column = column + tl.arange(0, BLOCK_N)[None, :] < num_columns
        z = tl.where(is_column, z, float("-inf"))
    return z


@triton.jit
def label_columns(
    columns: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, num_columns: tl.tensor
) -> tl.tensor:
    """Label column of each row in 32 bits, -1 where it is none of these columns."""
    label = tl.load(columns + rows, mask=rows < num_rows, other=-1)
    return tl.where((label >= 0) & (label < num_columns), label, -1).to(tl.int32)


@triton.jit
def next_label(label: tl.tensor, column: tl.tensor, num_columns: tl.tensor) -> tl.tensor:
    """First column from this one on that is a row's label; num_columns if there is none."""
    return tl.min(tl.where(label >= column, label, num_columns), axis=0)


@triton.jit
def finite(distance: tl.tensor) -> tl.tensor:
    """The distance where its exponential is not 0, else some number, so that their product is 0."""
    return tl.maximum(distance, -1000.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_grad(
    z: tl.tensor,
    dz: tl.tensor_descriptor,
    row: tl.tensor,
    column: tl.tensor,
    label: tl.tensor,
    m: tl.tensor,
    r: tl.tensor,
    g: tl.tensor,
    h: tl.tensor,
    e: tl.tensor,
    is_active: tl.tensor,
    is_special: tl.tensor,
    inverse_temperature: tl.tensor,
) -> tl.tensor:
    """Write the gradient of these logits; returns what rounding took from each row's sum.

    `is_special`: whether a column is a row's label, or a row has no gradient.
    """
    distance = z - m[:, None]
    p = tl.exp(distance) * r[:, None]
    if e is None:
        taken = g[:, None] * p
    else:
        # log p = distance + log r
        factor = (g + e * (h + tl.log(r)))[:, None] + e[:, None] * finite(distance)
        taken = factor * p
    grad = 0.0 - taken
    # Nested: of a branch with the product alone the compiler makes a product with 1 for every tile.
    if is_special | (inverse_temperature != 1.0):
        if is_special:
            is_label = column + tl.arange(0, z.shape[1])[None, :] == label[:, None]
            grad += tl.where(is_label, g[:, None], 0.0)
            grad = tl.where(is_active[:, None], grad, 0.0)
        grad *= inverse_temperature
    rounded, kept = _round(grad, dz.dtype)
    dz.store([row, column], rounded)
    return tl.sum(grad - kept, axis=1)


@triton.jit
def _round(values: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The float32 values rounded to this dtype, and these in float32 again.

    Two at a time: the compiler rounds one by one where both results are used.
    """
    if INTERPRETED or dtype == tl.float32:
        rounded = values.to(dtype)
        again = rounded.to(tl.float32)
    elif dtype == tl.bfloat16:
        rounded, again = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
            "=&r,=&r,=&r,r,r",
            [values],
            dtype=(tl.bfloat16, tl.float32),
            is_pure=True,
            pack=2,
        )
    else:
        rounded, again = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.f16x2.f32 $0, $4, $3; mov.b32 {low, high}, $0; "
            "cvt.f32.f16 $1, low; cvt.f32.f16 $2, high; }",
            "=&r,=&r,=&r,r,r",
            [values],
            dtype=(tl.float16, tl.float32),
            is_pure=True,
            pack=2,
        )
    return rounded, again
