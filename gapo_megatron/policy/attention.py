"""Attention over packed sequences, and the norm, where Transformer Engine is not installed.

T packed tokens, S sequences, L padded length, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn


@dataclass
class PackedSequences(PackedSeqParams):
    """What every layer needs to know about one micro-batch; computed once, before the layers."""

    cos: Tensor | None = None
    """[T, 1, D] cosines of the rotary angles."""
    sin: Tensor | None = None
    """[T, 1, D] sines; the first half negated, so that rotating is `x cos + swapped(x) sin`."""
    slots: Tensor | None = None
    """[T] int64: where each token goes when the buckets lie one after another, padded."""
    buckets: tuple[tuple[int, int], ...] = ()
    """(S, L) of every bucket: sequences of similar length share one padded attention call."""


def pack_sequences(
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    position_ids: Tensor,
    inverse_frequencies: Tensor,
    dtype: torch.dtype,
) -> PackedSequences:
    """Prepare rotary tables and the padded layout of a micro-batch.

    Args:
        cu_seqlens: [S + 1] int32 boundaries of the sequences in the packed row.
        max_seqlen: longest sequence, tokens.
        position_ids: [1, T] int64.
        inverse_frequencies: [D / 2] float32 rotary frequencies.
        dtype: of the activations; the angles are computed in float32.
    """
    angles = torch.outer(position_ids[0].float(), inverse_frequencies)[:, None, :]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    boundaries = cu_seqlens.tolist()
    slots, buckets = _padded_layout(boundaries)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cos=torch.cat([cos, cos], dim=-1),
        sin=torch.cat([-sin, sin], dim=-1),
        slots=slots.to(cu_seqlens.device),
        buckets=buckets,
    )


def _padded_layout(boundaries: list[int]) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Group sequences whose lengths have the same power-of-two ceiling; pad to the group's longest.

    A sequence grows to less than twice its length, so attention costs less than four times its
    minimum, in a handful of calls instead of one per sequence.
    """
    members: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(boundaries):
        members.setdefault((end - start - 1).bit_length(), []).append((start, end))
    slots = torch.empty(boundaries[-1], dtype=torch.int64)
    buckets = []
    offset = 0
    for _, sequences in sorted(members.items()):
        longest = max(end - start for start, end in sequences)
        for start, end in sequences:
            slots[start:end] = torch.arange(offset, offset + end - start)
            offset += longest
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


class PackedAttention(nn.Module):
    """Causal attention of packed (thd) sequences with grouped queries; never across sequences.

    Takes the place of Transformer Engine's core attention in the layer spec, rotary embedding
    included: the tables come once per micro-batch with `PackedSequences`.
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
        """Attend.

        Args:
            query: [T, N, D].
            key: [T, G, D].
            value: [T, G, D].
            attention_mask: unused; causality and the sequence boundaries are implied.
            packed_seq_params: the micro-batch's layout.

        Returns:
            [T, N * D] in the dtype of `query`.
        """
        packed = packed_seq_params
        num_slots = sum(rows * longest for rows, longest in packed.buckets)
        query, key = (
            _Rotate.apply(query, packed.cos, packed.sin),
            _Rotate.apply(key, packed.cos, packed.sin),
        )
        # One bucket without padding is already laid out as attention wants it.
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
            output = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1))
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return _FromSlots.apply(joined, packed.slots) if is_padded else joined


class RMSNorm(nn.Module):
    """Root-mean-square norm whose weight knows about sequence parallelism.

    Megatron-core's own fallback refuses sequence parallelism. There, every rank normalises its part
    of the sequence, and the marked weight's gradient is summed over the tensor parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], same dtype; statistics in float32."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
