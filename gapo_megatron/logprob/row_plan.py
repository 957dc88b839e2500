"""Row counts that the caller of the log-prob operator knows, which avoid synchronisation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gapo_megatron.device.flags import Flags


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
