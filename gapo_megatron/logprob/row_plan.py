"""Row counts that the log-prob operator's caller knows, so that no pass waits for the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gapo_megatron.device.flags import Flags


@dataclass
class RowPlan:
    """Facts about the rows of a call that the host knows, so that it need not ask the device.

    For a caller that has packed the rows itself: labels and row_index are not checked again.

    Attributes:
        flags: where a result that is not finite is kept; the caller reads it.
        row_edges: rows before the positions of each tensor parallel rank, and all rows at the end;
            (0, R) without sequence parallelism. Increasing.
        num_active: set before the backward pass: how many rows between two edges have a gradient.
            None: the backward pass computes all rows.
        sequence_of: for messages, which sequence of the batch a row belongs to; may wait.
    """

    flags: Flags
    row_edges: Sequence[int]
    num_active: Sequence[int] | None = None
    sequence_of: Callable[[int], int] | None = None


def active_rows(
    grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor | None, row_plan: RowPlan | None
) -> tuple[torch.Tensor, Sequence[int] | None]:
    """Rows with a gradient; the others (clipped sequences, A = 0) would add exact zeros.

    Args:
        grad_log_probs: [R].
        grad_entropy: [R]; None: there is none.
        row_plan: may leave the others in; None: waits for the device to know how many there are.

    Returns:
        [R_active] int64, increasing, and how many of them lie before each edge, as in
        `RowPlan.row_edges`; None: only the device knows.
    """
    if row_plan is not None and row_plan.num_active is None:
        return torch.arange(len(grad_log_probs), device=grad_log_probs.device), row_plan.row_edges
    is_active = grad_log_probs != 0
    if grad_entropy is not None:
        is_active = is_active | (grad_entropy != 0)
    if row_plan is None or row_plan.num_active is None:
        return is_active.nonzero()[:, 0], None
    edges = [0, *itertools.accumulate(row_plan.num_active)]
    # What `nonzero` gives, without asking for its length.
    in_order = torch.argsort((~is_active).to(torch.uint8), stable=True)
    return in_order[: edges[-1]], edges
