"""Context parallelism: the ranks of a group share every sequence of a micro-batch.

A sequence is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r: an early one, whose
causal attention is short, with a late one, so that all ranks do equal work. This is Transformer
Engine's layout. The log-probs of each rank's rows are joined before the loss, so all ranks of a
group compute the same loss, as tensor parallel ranks do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.device.transfer import to_device
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.types import Microbatch, Share


def num_chunks(cp_size: int) -> int:
    """Chunks per sequence, which must divide its padded length; 1: sequences stay whole."""
    return 2 * cp_size if cp_size > 1 else 1


def held_positions(cu_seqlens: Tensor, *, cp_rank: int, cp_size: int) -> Tensor:
    """Positions of the packed row that a rank holds, in its order: [T / cp] int64.

    Args:
        cu_seqlens: [S + 1] boundaries, multiples of `num_chunks(cp_size)`.
        cp_rank: the rank.
        cp_size: size of its context parallel group.
    """
    bounds = cu_seqlens.long()
    chunks = bounds.diff() // num_chunks(cp_size)
    starts = [bounds[:-1] + chunk * chunks for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank)]
    # First position and length of the two chunks of each sequence.
    firsts = torch.stack(starts, dim=1).flatten()
    lengths = chunks.repeat_interleave(2)
    offsets = torch.arange(int(lengths.sum()), device=bounds.device)
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return firsts.repeat_interleave(lengths) + offsets - begins


def cut(whole: Microbatch, groups: ParallelGroups) -> tuple[Microbatch, Tensor | None]:
    """Cut out this rank's share of a micro-batch.

    Args:
        whole: the same on all ranks of the context parallel group.
        groups: this rank's parallel groups.

    Returns:
        The share: tokens, positions and labels of this rank, with the boundaries of whole
        sequences; and the indices of the R rows that it scores, [R_local] int64 (None: all).
    """
    if groups.cp_size == 1:
        return whole, None
    held = held_positions(whole.cu_seqlens, cp_rank=groups.cp_rank, cp_size=groups.cp_size)
    place = torch.full_like(whole.tokens[0], -1)
    place[held] = torch.arange(len(held), device=held.device)
    rows = (place[whole.row_index] >= 0).nonzero().flatten()
    share = dataclasses.replace(
        whole,
        tokens=whole.tokens[:, held],
        position_ids=whole.position_ids[:, held],
        row_index=place[whole.row_index[rows]],
        labels=whole.labels[rows],
        sequence_ids=whole.sequence_ids[rows],
    )
    return share, rows


_TENSORS = ("tokens", "position_ids", "cu_seqlens", "row_index", "labels", "sequence_ids")


def to_rank(
    whole: Microbatch, groups: ParallelGroups, *, num_shards: int, device: torch.device
) -> Microbatch:
    """Copy a micro-batch and this rank's share of it to the device, in one transfer.

    Everything that depends on values, such as the number of rows a rank scores, is computed here on
    the host, which would otherwise wait for the device.

    Args:
        whole: on the CPU.
        groups: this rank's parallel groups.
        num_shards: number of sequence parallel ranks; divides the positions.
        device: device of the result.
    """
    share, rows = cut(whole, groups)
    starts = np.arange(num_shards + 1) * (share.tokens.shape[1] // num_shards)
    row_edges = np.searchsorted(share.row_index.numpy(), starts)
    parts = [whole] if rows is None else [whole, share]
    on_host = [getattr(part, name) for part in parts for name in _TENSORS]
    if rows is not None:
        on_host.append(rows)
    placed = iter(to_device([tensor.numpy() for tensor in on_host], device))

    def with_tensors(part: Microbatch) -> Microbatch:
        tensors: dict[str, Any] = {name: next(placed) for name in _TENSORS}
        return dataclasses.replace(part, **tensors)

    whole = with_tensors(whole)
    share = whole if rows is None else with_tensors(share)
    held = Share(share, next(placed, None), tuple(int(edge) for edge in row_edges))
    return dataclasses.replace(whole, share=held)


def join_rows(values: Tensor, rows: Tensor, num_rows: int, groups: ParallelGroups) -> Tensor:
    """Values [R] of all rows, on every rank of the context parallel group, with autograd.

    Args:
        values: [R_local] of this rank's rows.
        rows: their indices, from `cut`.
        num_rows: R.
        groups: this rank's parallel groups.

    Collectives: one all-reduce over the context parallel group if R > 0; none backward.
    """
    joined: Tensor = _JoinRows.apply(values, rows, num_rows, groups.cp_group)
    return joined


class _JoinRows(torch.autograd.Function):
    """Join the rows of all ranks. All compute the same loss, so backward only selects rows."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, rows: Tensor, num_rows: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(rows)
        # Each row has one rank; adding the others' zeros changes no bit.
        joined = values.new_zeros(num_rows).index_copy_(0, rows, values)
        if num_rows:
            dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None, None


class GatherTokens(torch.autograd.Function):
    """[T / cp, ...] of each rank -> [T, ...], in rank order; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        shares = [torch.empty_like(share) for _ in range(group.size())]
        dist.all_gather(shares, share.contiguous(), group=group)
        return torch.cat(shares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()].clone(), None
