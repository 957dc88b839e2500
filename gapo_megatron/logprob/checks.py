"""Checks of the log-prob operator's inputs; messages name the argument and, if any, the row."""

from __future__ import annotations

import torch

from gapo_megatron.errors import DivergenceError
from gapo_megatron.logprob.row_plan import RowPlan
from gapo_megatron.logprob.statistics import accumulation_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    width = hidden.shape[1]
    if weight.dim() != 2 or weight.shape[1] != width or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} must be [V_local, {width}] "
            f"{hidden.dtype} like hidden"
        )
    if len(weight) == 0:
        raise ValueError("weight has no row: V_local must be at least 1")
    if labels.dim() != 1 or labels.dtype != torch.int64:
        raise ValueError(f"labels {tuple(labels.shape)} {labels.dtype} must be [R] torch.int64")
    if row_index is not None and (
        row_index.shape != labels.shape or row_index.dtype != torch.int64
    ):
        raise ValueError(
            f"row_index {tuple(row_index.shape)} {row_index.dtype} must be [{len(labels)}] "
            "torch.int64 like labels"
        )
    if main_grad is not None and (
        main_grad.shape != weight.shape or main_grad.dtype != accumulation_dtype(weight.dtype)
    ):
        raise ValueError(
            f"main_grad {tuple(main_grad.shape)} {main_grad.dtype} must be {tuple(weight.shape)} "
            f"{accumulation_dtype(weight.dtype)}"
        )
    others = {"weight": weight, "labels": labels, "row_index": row_index, "main_grad": main_grad}
    for name, tensor in others.items():
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
