"""Rows of the log-prob operator: what its caller knows of them, and checks of its inputs.

Messages name the argument and, if any, the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gapo_megatron.device import Flags
from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob.tiles import accumulation_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class RowPlan:
    """Row counts known on the host, so that no pass has to synchronise with the device.

    For callers that pack the rows themselves: labels and row_index are not checked.

    Attributes:
        flags: receives a flag for results that are not finite; the caller reads it.
        row_edges: number of rows before the positions of each tensor-parallel rank, and R at the
            end; (0, R) without sequence parallelism. Increasing.
        num_active: exact number of rows with a gradient between two edges, set before the backward
            pass. None: the backward pass computes all rows.
        sequence_of: maps a row to its sequence in the batch, for messages; may synchronise.
    """

    flags: Flags
    row_edges: Sequence[int]
    num_active: Sequence[int] | None = None
    sequence_of: Callable[[int], int] | None = None


def active_rows(
    grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor | None, row_plan: RowPlan | None
) -> tuple[torch.Tensor, Sequence[int] | None]:
    """Select the rows with a gradient; the others (clipped sequences, A = 0) would add zeros.

    Args:
        grad_log_probs: [R].
        grad_entropy: [R], or None.
        row_plan: without `num_active` all rows are selected; None: synchronises to count them.

    Returns:
        [R_active] int64, increasing, and the number of them before each edge, as in
        `RowPlan.row_edges`; None without a `row_plan`.
    """
    if row_plan is not None and row_plan.num_active is None:
        return torch.arange(len(grad_log_probs), device=grad_log_probs.device), row_plan.row_edges
    is_active = grad_log_probs != 0
    if grad_entropy is not None:
        is_active = is_active | (grad_entropy != 0)
    if row_plan is None or row_plan.num_active is None:
        return is_active.nonzero()[:, 0], None
    edges = [0, *itertools.accumulate(row_plan.num_active)]
    # Without synchronising for its length.
    return torch.nonzero_static(is_active, size=edges[-1])[:, 0], edges


def check_tensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    row_index: torch.Tensor | None,
    main_grad: torch.Tensor | None,
) -> None:
    """Raise ValueError for a shape, dtype or device that does not fit."""
    if hidden.dim() != 2 or hidden.dtype not in DTYPES or hidden.shape[1] == 0:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype} must be [T, H] in one of {DTYPES}, H > 0"
        )
    if len(weight) == 0:
        raise ValueError("weight has no row: V_local must be at least 1")
    like_hidden, accumulated = (len(weight), hidden.shape[1]), accumulation_dtype(weight.dtype)
    for name, tensor, shape, dtype, rule in (
        ("weight", weight, like_hidden, hidden.dtype, "[V_local, H] like hidden"),
        ("labels", labels, (len(labels),), torch.int64, "[R]"),
        ("row_index", row_index, labels.shape, torch.int64, "[R] like labels"),
        ("main_grad", main_grad, weight.shape, accumulated, "like weight"),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            raise ValueError(
                f"{name} {tuple(tensor.shape)} {tensor.dtype} must be {tuple(shape)} {dtype}: "
                f"{rule}"
            )
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} ({tensor.device}) must be on hidden's {hidden.device}")


def check_rows(labels: torch.Tensor, row_index: torch.Tensor | None, num_rows: int) -> None:
    """Raise ValueError unless there is one label for each row, in the order of the rows."""
    if row_index is None:
        if len(labels) != num_rows:
            raise ValueError(f"labels ({len(labels)}) must have one entry per row ({num_rows})")
        return
    outside = (row_index < 0) | (row_index >= num_rows)
    outside[1:] |= row_index[1:] <= row_index[:-1]
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"row_index[{row}] ({int(row_index[row])}) must be above the entry before it and in "
            f"0..{num_rows - 1}"
        )


def check_labels(labels: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError for a label outside of the vocabulary."""
    outside = (labels < 0) | (labels >= vocab_size)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"labels[{row}] ({int(labels[row])}) must be in 0..{vocab_size - 1}")


def flag_not_finite(
    row_plan: RowPlan,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    rows: torch.Tensor,
    row_index: torch.Tensor | None,
    weight: torch.Tensor,
    vocab_start: int,
) -> None:
    """Flag results that are not finite. The DivergenceError names row, sequence and cause.

    `rows` are the scored hidden states [R, H], row r from position row_index[r] (None: r). They are
    not kept: what the message says about them is computed here, on the device.

    Every tensor-parallel rank sees the same results, so all of them raise and none hangs.
    """
    if not len(rows):
        return
    is_finite = log_probs.isfinite()
    if entropy is not None:
        is_finite = is_finite & entropy.isfinite()
    bad = ~is_finite
    first = bad.to(torch.uint8).argmax()
    row_is_finite = rows.index_select(0, first[None]).isfinite().all()

    def explain() -> DivergenceError:
        row, num_rows = int(first), int(bad.sum())
        place = f"row {row}"
        if row_plan.sequence_of is not None:
            place += f", in sequence {row_plan.sequence_of(row)} of the batch,"
        message = f"log-probability of {place} is not finite ({num_rows} rows in all): "
        bad_weight = (~weight.isfinite().all(dim=1)).nonzero()
        if not bool(row_is_finite):
            position = row if row_index is None else int(row_index[row])
            cause = f"hidden[{position}] is not finite"
        elif len(bad_weight):
            cause = f"weight row of token {vocab_start + int(bad_weight[0])} is not finite"
        else:
            cause = "its logits overflow, or a weight row of another rank's shard is not finite"
        return DivergenceError(message + cause)

    row_plan.flags.keep(~is_finite.all(), explain)
