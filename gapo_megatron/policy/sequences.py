"""Layout of a micro-batch of packed sequences for attention without Transformer Engine.

T packed tokens, S sequences, L padded length, R rotated elements of a head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from gapo_megatron.policy.context import held_positions
from gapo_megatron.policy.rotary import Rotary


@dataclass
class PackedSequences(PackedSeqParams):
    """Layout of a micro-batch, which every layer reads; computed once, before the first layer."""

    cos: Tensor | None = None
    """[T, 1, R] cosines of the rotary angles of a head's first R elements; `Rotary.dtype`."""
    sin: Tensor | None = None
    """[T, 1, R] sines, the first half negated, so that rotating is `x cos + swapped(x) sin`."""
    windowed_tables: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of windowed layers; None: the same."""
    slots: Tensor | None = None
    """[T] int64: slot of each token in the padded, concatenated buckets. None: the fused kernel
    reads packed tokens, and there are no buckets."""
    buckets: tuple[tuple[int, int], ...] = ()
    """(S, L) of every bucket: sequences of similar length share one padded attention call."""
    window_masks: tuple[Tensor | None, ...] = ()
    """Per bucket [L, L] bool: True where a query of a windowed layer attends to a key. None: the
    window is as long as the sequences."""
    context: ContextShare | None = None
    """Context parallel share; `cos`, `sin` and `slots` are then of this rank's tokens."""


@dataclass
class ContextShare:
    """Layout for context parallelism: a rank's queries attend to the keys and values of all."""

    group: dist.ProcessGroup
    key_slots: Tensor
    """[T] int64: slots of the gathered tokens, in rank order."""
    masks: tuple[Tensor, ...]
    """Per bucket [S, 1, L / cp, L] bool: True where a query attends to a key."""
    window_masks: tuple[Tensor, ...]
    """The same of windowed layers; empty: the model has none."""


def pack_sequences(
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    position_ids: Tensor,
    rotary: Rotary,
    dtype: torch.dtype,
    cp_group: dist.ProcessGroup,
    window: int = 0,
) -> PackedSequences:
    """Prepare rotary tables and, for attention without the fused kernel, the padded layout.

    For the fused kernel, nothing is read back from the device.

    Args:
        cu_seqlens: [S + 1] int32 boundaries of the sequences in the packed row.
        max_seqlen: longest sequence, tokens.
        position_ids: [1, T / cp] int64, of this rank's tokens.
        rotary: the model's frequencies; the angles are computed in float32.
        dtype: dtype of the activations.
        cp_group: ranks that share the sequences.
        window: keys that a query of a windowed layer sees, its own included; 0: no such layers.
    """
    positions = position_ids[0].float()
    cos, sin = _rotary_tables(positions, rotary.frequencies, rotary.dtype, rotary.magnitude)
    windowed_tables = None
    if rotary.windowed_frequencies is not None:
        windowed_tables = _rotary_tables(positions, rotary.windowed_frequencies, rotary.dtype)
    cp_size = cp_group.size()
    slots, context = None, None
    masks: tuple[Tensor | None, ...] = ()
    buckets: tuple[tuple[int, int], ...] = ()
    if not (cp_size == 1 and has_fused_kernel(cu_seqlens.device, dtype)):
        slots, buckets = _padded_layout(cu_seqlens.tolist(), num_shares=cp_size)
        if cp_size > 1:
            context = _context_share(
                cu_seqlens, position_ids[0], slots, buckets, cp_group, window=window
            )
        elif window:
            masks = tuple(_band(longest, window, cu_seqlens.device) for _, longest in buckets)
        slots = slots.to(cu_seqlens.device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cos=cos,
        sin=sin,
        windowed_tables=windowed_tables,
        slots=slots,
        buckets=buckets,
        window_masks=masks,
        context=context,
    )


def _rotary_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`PackedSequences.cos` and `.sin`."""
    angles = torch.outer(positions, frequencies)[:, None, :]
    cos, sin = ((magnitude * table).to(dtype) for table in (angles.cos(), angles.sin()))
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def _band(longest: int, window: int, device: torch.device) -> Tensor | None:
    """[L, L] bool: True where a query sees a key; None: it sees all keys before it."""
    if longest <= window:
        return None
    everything = torch.ones(longest, longest, dtype=torch.bool, device=device)
    return everything.tril_().triu_(1 - window)


def _context_share(
    cu_seqlens: Tensor,
    positions: Tensor,
    query_slots: Tensor,
    buckets: tuple[tuple[int, int], ...],
    group: dist.ProcessGroup,
    *,
    window: int,
) -> ContextShare:
    cp_size = group.size()
    slots, _ = _padded_layout(cu_seqlens.tolist())
    device = cu_seqlens.device
    held = [
        held_positions(cu_seqlens, cp_rank=rank, cp_size=cp_size).cpu() for rank in range(cp_size)
    ]
    # A padding slot attends to all keys: with none, softmax would give NaN.
    num_queries = sum(rows * longest for rows, longest in buckets) // cp_size
    last_key = torch.full((num_queries,), max(longest for _, longest in buckets), device=device)
    last_key[query_slots.to(device)] = positions
    first_key = torch.zeros_like(last_key)
    if window:
        first_key[query_slots.to(device)] = (positions - window + 1).clamp_(min=0)
    masks, window_masks = [], []
    start = 0
    for rows, longest in buckets:
        end = start + rows * longest // cp_size
        keys = torch.arange(longest, device=device)
        shape = (rows, 1, -1, longest)
        masks.append((keys <= last_key[start:end, None]).view(shape))
        if window:
            window_masks.append((keys >= first_key[start:end, None]).view(shape) & masks[-1])
        start = end
    key_slots = slots[torch.cat(held)].to(device)
    return ContextShare(group, key_slots, tuple(masks), tuple(window_masks))


def _padded_layout(
    boundaries: list[int], *, num_shares: int = 1
) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Group sequences whose lengths have the same power-of-two ceiling; pad to the group's longest.

    Padding less than doubles a sequence, so attention costs less than four times the minimum, in a
    few calls instead of one per sequence.

    Args:
        boundaries: boundaries of the whole sequences.
        num_shares: number of equal shares of every sequence; the slots are those of one share.

    Returns:
        Slots [T / num_shares], and (S, L) of every bucket of whole sequences.
    """
    members: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(boundaries):
        members.setdefault((end - start - 1).bit_length(), []).append((start, end))
    slots = torch.empty(boundaries[-1] // num_shares, dtype=torch.int64)
    buckets = []
    offset = 0
    for _, sequences in sorted(members.items()):
        longest = max(end - start for start, end in sequences)
        for start, end in sequences:
            first, last = start // num_shares, end // num_shares
            slots[first:last] = torch.arange(offset, offset + last - first)
            offset += longest // num_shares
        buckets.append((len(sequences), longest))
    return slots, tuple(buckets)


def has_fused_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's FlashAttention reads packed tokens as they are."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
