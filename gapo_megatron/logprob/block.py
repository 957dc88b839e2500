"""The backward pass of one block of rows: its part of dX, and its dW.

Shapes: R_b rows of the block, H hidden size, V_local rows of the output layer on this rank.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gapo_megatron.logprob import tiles
from gapo_megatron.logprob.tiles import accumulation_dtype

ROW_MULTIPLE = 16
"""Blocks in the backward pass are padded to a multiple of this many rows: BLAS libraries use other
kernels for a handful of rows, and dX of a row would depend on the size of its block."""


class BlockRows(NamedTuple):
    """Values of a block's R_b rows for the gradient, besides hidden states and weight.

    All [R_b]; two are None without a gradient of the entropy.
    """

    columns: torch.Tensor
    """int64: the label's column in this shard; outside of it if the label is in another shard."""
    maximum: torch.Tensor
    sum_exp: torch.Tensor
    grad_log_probs: torch.Tensor
    entropy: torch.Tensor | None
    grad_entropy: torch.Tensor | None
    kept: tuple[torch.Tensor, torch.Tensor] | None
    """Logits that the forward pass has kept, and which of their rows are the block's first."""


def block_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: BlockRows,
    *,
    grad_weight: torch.Tensor | None,
    overwrite: bool,
    hidden_needs_grad: bool,
    code: Any,
    inverse_temperature: float,
) -> torch.Tensor | None:
    """Add a block's dW to `grad_weight`; return this shard's part of its dX [R_b, H].

    With `overwrite` dW replaces what is in `grad_weight`, which saves a pass over its memory.
    `hidden` [R_b, H] has the block's rows, `code` is the module with `grad_logits`; dX is in the
    accumulation dtype.
    """
    num_rows, padded = len(hidden), functools.partial(pad, multiple=ROW_MULTIPLE)
    # Padding rows have g = e = 0, a sum of 1 and an m above any logit: finite, adding exact zeros.
    x_b, columns, g = map(padded, (hidden, rows.columns, rows.grad_log_probs))
    m = padded(rows.maximum, value=1e30)
    inverse_sum = padded(rows.sum_exp, value=1).reciprocal()
    h = None if rows.entropy is None else padded(rows.entropy)
    e = None if rows.grad_entropy is None else padded(rows.grad_entropy)
    grad_hidden = torch.zeros(x_b.shape, dtype=accumulation_dtype(x_b.dtype), device=x_b.device)
    _, num_columns = code.block_shape(weight)
    lost, mean_weights = [], []
    for start in range(0, len(weight), num_columns):
        w_v = weight[start : start + num_columns]
        grad_logits = code.grad_logits
        if rows.kept is not None:
            logits, those = rows.kept
            kept_v = tiles.kept_tile(logits, start, start + len(w_v))
            those = padded(those) if len(those) == num_rows else those
            grad_logits = functools.partial(grad_logits, kept=(kept_v, those))
        dz, lost_v = grad_logits(
            x_b,
            w_v,
            columns - start,
            inverse_temperature=inverse_temperature,
            maximum=m,
            inverse_sum=inverse_sum,
            grad_log_probs=g,
            entropy=h,
            grad_entropy=e,
        )
        if hidden_needs_grad:
            tiles.add_product_(grad_hidden, dz, w_v)
            if lost_v is not None:
                lost.append(lost_v)
                mean_weights.append(w_v.mean(dim=0, dtype=grad_hidden.dtype))
        if grad_weight is not None:
            tiles.add_product_(
                grad_weight[start : start + len(w_v)], dz.t(), x_b, overwrite=overwrite
            )
    if lost:
        # A row of dz sums to zero over the vocabulary, but not after rounding: the common part of
        # the weights (an offset of all logits) would leak into dX. This corrects it.
        grad_hidden.addmm_(torch.stack(lost, dim=1), torch.stack(mean_weights))
    return grad_hidden[:num_rows] if hidden_needs_grad else None


def pad(values: torch.Tensor, multiple: int, *, value: float = 0) -> torch.Tensor:
    """Append rows of `value` up to a multiple of rows."""
    padding = -len(values) % multiple
    if not padding:
        return values
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, padding), value=value)
