"""Context parallelism: the ranks of a group split every sequence of a micro-batch.

A sequence is split into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r: an early chunk,
whose causal attention is short, and a late chunk, so that all ranks do equal work. This is
Transformer Engine's layout. The log-probs of each rank's rows are joined before the loss, so all
ranks of a group compute the same loss, as tensor parallel ranks do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gapo_megatron.device import to_device
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.types import Microbatch


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


def cut(whole: Microbatch, groups: ParallelGroups) -> Microbatch:
    """This rank's part of a micro-batch: tokens, positions, rows and labels.

    Args:
        whole: the same on all ranks of the context parallel group.
        groups: this rank's parallel groups.
    """
    if groups.cp_size == 1:
        return whole
    held = held_positions(whole.cu_seqlens, cp_rank=groups.cp_rank, cp_size=groups.cp_size)
    place = torch.full_like(whole.tokens[0], -1)
    place[held] = torch.arange(len(held), device=held.device)
    rows = (place[whole.row_index] >= 0).nonzero().flatten()
    return dataclasses.replace(
        whole,
        tokens=whole.tokens[:, held],
        position_ids=whole.position_ids[:, held],
        is_padding=whole.is_padding[:, held],
        row_index=place[whole.row_index[rows]],
        labels=whole.labels[rows],
        rows=rows,
    )


def to_rank(
    whole: Microbatch, groups: ParallelGroups, *, num_shards: int, device: torch.device
) -> Microbatch:
    """Put this rank's part of a micro-batch on the device, in one copy.

    Everything that depends on values, such as the number of rows a rank scores, is computed here on
    the host, which would otherwise wait for the device.

    Args:
        whole: on the CPU.
        groups: this rank's parallel groups.
        num_shards: number of sequence parallel ranks; divides the positions.
        device: device of the result.
    """
    part = cut(whole, groups)
    starts = np.arange(num_shards + 1) * (part.tokens.shape[1] // num_shards)
    row_edges = np.searchsorted(part.row_index.numpy(), starts)
    tensors = {
        one.name: value.numpy()
        for one in dataclasses.fields(part)
        if isinstance(value := getattr(part, one.name), Tensor)
    }
    placed: Any = dict(zip(tensors, to_device([*tensors.values()], device), strict=True))
    return dataclasses.replace(part, **placed, row_edges=tuple(int(edge) for edge in row_edges))


def join_rows(values: Tensor, rows: Tensor, num_rows: int, groups: ParallelGroups) -> Tensor:
    """Values [R] of all rows, on every rank of the context parallel group, with autograd.

    Args:
        values: [R_local] of this rank's rows.
        rows: numbers of these rows (`Microbatch.rows`).
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
