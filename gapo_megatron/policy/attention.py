"""Attention over packed sequences, and RMSNorm, for use without Transformer Engine.

On CUDA in 16 bits, one call of torch's variable-length FlashAttention handles all sequences.
Otherwise (CPU; fp32, which that kernel does not support; context parallelism) sequences of similar
length are padded and share a call of `scaled_dot_product_attention`.

NOT YET RUN ON A GPU.

T packed tokens, S sequences, L padded length, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from gapo_megatron.compat.torch import (
    deterministic_algorithms,
    flash_attention,
    flash_attention_backward,
)
from gapo_megatron.policy.context import GatherTokens, held_positions


@dataclass
class PackedSequences(PackedSeqParams):
    """Layout of a micro-batch, which every layer reads; computed once, before the first layer."""

    cos: Tensor | None = None
    """[T, 1, D] cosines of the rotary angles."""
    sin: Tensor | None = None
    """[T, 1, D] sines, the first half negated, so that rotating is `x cos + swapped(x) sin`."""
    slots: Tensor | None = None
    """[T] int64: slot of each token in the padded, concatenated buckets. None: the fused kernel
    reads packed tokens, and there are no buckets."""
    buckets: tuple[tuple[int, int], ...] = ()
    """(S, L) of every bucket: sequences of similar length share one padded attention call."""
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


def pack_sequences(
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    position_ids: Tensor,
    inverse_frequencies: Tensor,
    dtype: torch.dtype,
    cp_group: dist.ProcessGroup,
) -> PackedSequences:
    """Prepare rotary tables and, for attention without the fused kernel, the padded layout.

    For the fused kernel, nothing is read back from the device.

    Args:
        cu_seqlens: [S + 1] int32 boundaries of the sequences in the packed row.
        max_seqlen: longest sequence, tokens.
        position_ids: [1, T / cp] int64, of this rank's tokens.
        inverse_frequencies: [D / 2] float32 rotary frequencies.
        dtype: dtype of the activations; the angles are computed in float32.
        cp_group: ranks that share the sequences.
    """
    angles = torch.outer(position_ids[0].float(), inverse_frequencies)[:, None, :]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    cp_size = cp_group.size()
    slots, context = None, None
    buckets: tuple[tuple[int, int], ...] = ()
    if not (cp_size == 1 and _has_fused_kernel(cu_seqlens.device, dtype)):
        slots, buckets = _padded_layout(cu_seqlens.tolist(), num_shares=cp_size)
        if cp_size > 1:
            context = _context_share(cu_seqlens, position_ids[0], slots, buckets, cp_group)
        slots = slots.to(cu_seqlens.device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cos=torch.cat([cos, cos], dim=-1),
        sin=torch.cat([-sin, sin], dim=-1),
        slots=slots,
        buckets=buckets,
        context=context,
    )


def _context_share(
    cu_seqlens: Tensor,
    positions: Tensor,
    query_slots: Tensor,
    buckets: tuple[tuple[int, int], ...],
    group: dist.ProcessGroup,
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
    masks = []
    start = 0
    for rows, longest in buckets:
        end = start + rows * longest // cp_size
        keys = torch.arange(longest, device=device)
        masks.append((keys <= last_key[start:end, None]).view(rows, 1, -1, longest))
        start = end
    return ContextShare(group, slots[torch.cat(held)].to(device), tuple(masks))


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


class _Rotate(torch.autograd.Function):
    """Rotary embedding: x cos + swapped(x) sin, halves swapped. Backward rotates the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return (grad * cos).addcmul_(grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


class _ToSlots(torch.autograd.Function):
    """[T, ...] -> [slots, ...], zeros where padded. Adjoint of `_FromSlots`; free of atomics."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        padded = values.new_zeros(num_slots, *values.shape[1:])
        return padded.index_copy_(0, slots, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


class _FromSlots(torch.autograd.Function):
    """[slots, ...] -> [T, ...]. Adjoint of `_ToSlots`."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.num_slots, *grad.shape[1:])
        return padded.index_copy_(0, slots, grad), None


def _has_fused_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class _FusedAttention(torch.autograd.Function):
    """Causal attention of all packed sequences in one kernel, without a mask.

    The same kernels as `torch.nn.attention.varlen.varlen_attn` in torch 2.11 and 2.13, whose
    backward pass uses atomic additions. Here both passes are deterministic, so that a resumed run
    has the same bits; this needs a buffer of T N D float32, times multiprocessors / (S N) rounded
    up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
    ) -> Tensor:
        # With a longest length of 1, torch would treat heads as positions.
        ctx.shape = cu_seqlens, cu_seqlens, max(max_seqlen, 2), max(max_seqlen, 2)
        ctx.scale = scale
        out, *others = flash_attention(query, key, value, ctx.shape, scale=scale)
        ctx.save_for_backward(query, key, value, out, *others)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with deterministic_algorithms():
            gradients = flash_attention_backward(
                grad, ctx.saved_tensors, ctx.shape, scale=ctx.scale
            )
        return *gradients, None, None, None


class PackedAttention(nn.Module):
    """Causal grouped-query attention within each packed (thd) sequence.

    Replaces Transformer Engine's core attention in the layer spec, and includes the rotary
    embedding, whose tables come with `PackedSequences` once per micro-batch.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Rotate queries and keys, and attend.

        Args:
            query: [T, N, D]; under context parallelism this rank's share, [T / cp, ...].
            key: [T, G, D], likewise.
            value: [T, G, D], likewise.
            attention_mask: unused; attention is causal within sequences.
            packed_seq_params: the micro-batch's layout.

        Returns:
            [T, N * D] in the dtype of `query`, likewise.

        Collectives: under context parallelism an all-gather of keys and one of values; backward
        an all-reduce of each.
        """
        packed = packed_seq_params
        query, key = (
            _Rotate.apply(query, packed.cos, packed.sin),
            _Rotate.apply(key, packed.cos, packed.sin),
        )
        if packed.slots is None:
            output = _FusedAttention.apply(
                query, key, value, packed.cu_seqlens_q, packed.max_seqlen_q, self.softmax_scale
            )
            return output.flatten(1)
        if packed.context:
            return self._attend_in_context(query, key, value, packed, packed.context)
        num_slots = sum(rows * longest for rows, longest in packed.buckets)
        # A single bucket without padding already has the padded layout.
        is_padded = num_slots > len(query) or len(packed.buckets) > 1
        if is_padded:
            query, key, value = (
                _ToSlots.apply(x, packed.slots, num_slots) for x in (query, key, value)
            )
        outputs = []
        start = 0
        for rows, longest in packed.buckets:
            bucket = slice(start, start := start + rows * longest)
            q, k, v = (
                x[bucket].unflatten(0, (rows, longest)).transpose(1, 2) for x in (query, key, value)
            )
            output = self._attend(q, k, v, is_causal=True)
            outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1))
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return _FromSlots.apply(joined, packed.slots) if is_padded else joined

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attend in padded sequences: [S, N, L, D] from keys and values [S, G, L, D]."""
        grouped = not (query.is_cuda and query.dtype == torch.float32)
        if not grouped:
            # The only fp32 kernel without a matrix of scores does not support groups.
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, scale=self.softmax_scale, enable_gqa=grouped, **options
        )

    def _attend_in_context(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSequences,
        context: ContextShare,
    ) -> Tensor:
        """Attend with this rank's queries [T / cp, N, D] to the keys and values of all ranks.

        This shares the work but saves little memory: every rank holds all keys and values, and
        masks of its queries against them, unlike Transformer Engine's ring.
        """
        num_keys = sum(rows * longest for rows, longest in packed.buckets)
        num_queries = sum(mask.shape[0] * mask.shape[2] for mask in context.masks)
        query = _ToSlots.apply(query, packed.slots, num_queries)
        key, value = (
            _ToSlots.apply(GatherTokens.apply(x, context.group), context.key_slots, num_keys)
            for x in (key, value)
        )
        outputs = []
        for q, k, v, mask in zip(
            query.split([mask.shape[0] * mask.shape[2] for mask in context.masks]),
            *(x.split([rows * longest for rows, longest in packed.buckets]) for x in (key, value)),
            context.masks,
            strict=True,
        ):
            q, k, v = (x.unflatten(0, (len(mask), -1)).transpose(1, 2) for x in (q, k, v))
            output = self._attend(q, k, v, attn_mask=mask)
            outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1))
        return _FromSlots.apply(torch.cat(outputs), packed.slots)


class RMSNorm(nn.Module):
    """RMSNorm that supports sequence parallelism, unlike Megatron-core's own fallback.

    Every rank normalises its part of the sequence. The weight is marked, so that Megatron-core sums
    its gradient over the tensor parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], same dtype; statistics in float32."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
