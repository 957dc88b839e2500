"""Attention over packed sequences, for use without Transformer Engine.

On CUDA in 16 bits, one call of torch's variable-length FlashAttention handles all sequences.
Otherwise (CPU; fp32, which that kernel does not support; context parallelism) sequences of similar
length are padded and share a call of `scaled_dot_product_attention`.

NOT YET RUN ON A GPU.

T packed tokens, S sequences, L padded length, N query heads, G key/value heads, D head size, of
which R elements are rotated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from gapo_megatron.compat.torch import (
    deterministic_algorithms,
    flash_attention,
    flash_attention_backward,
)
from gapo_megatron.policy.context import GatherTokens
from gapo_megatron.policy.sequences import ContextShare, PackedSequences
from gapo_megatron.policy.sinks import attend_with_sinks, gradient_of_sinks, with_sinks


class _Rotate(torch.autograd.Function):
    """Rotary embedding: x cos + swapped(x) sin, halves swapped. Backward rotates the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grad, *ctx.saved_tensors, sign=-1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    """Rotate the first R elements of every head [T, N, D] by +-1 times the angles [T, 1, R].

    Computed in the wider dtype of `x` and the tables; returns that of `x`.
    """
    if (size := cos.shape[-1]) < x.shape[-1]:
        rotated = _rotate(x[..., :size], cos, sin, sign=sign)
        return torch.cat([rotated, x[..., size:]], dim=-1)
    return (x * cos).addcmul_(x.roll(size // 2, -1), sin, value=sign).to(x.dtype)


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
        sinks: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        # With a longest length of 1, torch would treat heads as positions.
        ctx.shape = cu_seqlens, cu_seqlens, max(max_seqlen, 2), max(max_seqlen, 2)
        ctx.options = options
        out, log_sums, *others = flash_attention(query, key, value, ctx.shape, **options)
        if sinks is not None:
            out, log_sums = with_sinks(out, log_sums, sinks)
        ctx.save_for_backward(sinks, query, key, value, out, log_sums, *others)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sinks, *saved = ctx.saved_tensors
        with deterministic_algorithms():
            gradients = flash_attention_backward(grad, saved, ctx.shape, **ctx.options)
        of_sinks = None
        if sinks is not None:
            out, log_sums = saved[3], saved[4]
            of_sinks = gradient_of_sinks(grad, out, log_sums, sinks)
        return *gradients, None, None, of_sinks, None


class PackedAttention(nn.Module):
    """Causal grouped-query attention within each packed (thd) sequence.

    Replaces Transformer Engine's core attention in the layer spec, and includes the rotary
    embedding, whose tables come with `PackedSequences` once per micro-batch.
    """

    def __init__(
        self, config: Any, layer_number: int, *, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5
        self.softmax_offset: nn.Parameter | None = None
        """Sinks [N / tp], if the model has them; Megatron-core's name."""
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self.window = 0
        """Keys that a query sees, its own included; 0: all before it."""
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0] + 1

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
            value: [T, G, D] or smaller, likewise.
            attention_mask: unused; attention is causal within sequences.
            packed_seq_params: the micro-batch's layout.

        Returns:
            [T, N * D], D of the values, in the dtype of `query`, likewise.

        Collectives: under context parallelism an all-gather of keys and one of values; backward
        an all-reduce of each.
        """
        if (size := value.shape[-1]) < query.shape[-1]:
            # The kernels without a matrix of scores take one size of heads.
            value = F.pad(value, (0, query.shape[-1] - size))
            attended = self.forward(
                query, key, value, attention_mask, packed_seq_params=packed_seq_params
            )
            return attended.unflatten(1, (query.shape[1], -1))[..., :size].flatten(1)
        packed = packed_seq_params
        tables = (packed.cos, packed.sin)
        if self.window and packed.windowed_tables is not None:
            tables = packed.windowed_tables
        query, key = _Rotate.apply(query, *tables), _Rotate.apply(key, *tables)
        if packed.slots is None:
            options = {"scale": self.softmax_scale, "window": self.window}
            output = _FusedAttention.apply(
                query,
                key,
                value,
                packed.cu_seqlens_q,
                packed.max_seqlen_q,
                self.softmax_offset,
                options,
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
        masks = packed.window_masks if self.window else (None,) * len(packed.buckets)
        for (rows, longest), mask in zip(packed.buckets, masks, strict=True):
            bucket = slice(start, start := start + rows * longest)
            q, k, v = (
                x[bucket].unflatten(0, (rows, longest)).transpose(1, 2) for x in (query, key, value)
            )
            output = self._attend_where(mask, q, k, v)
            outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1))
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return _FromSlots.apply(joined, packed.slots) if is_padded else joined

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Megatron-core's description of the sinks on disk, as its own attention gives it."""
        state = self.state_dict(keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return sharded

    def _attend_where(
        self, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend where the mask says, with sinks if there are any; None: causally."""
        if self.softmax_offset is None:
            return self._attend(query, key, value, attn_mask=mask, is_causal=mask is None)
        return attend_with_sinks(
            self._attend,
            query,
            key,
            value,
            self.softmax_offset,
            scale=self.softmax_scale,
            attn_mask=mask,
        )

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
        masks = context.window_masks if self.window else context.masks
        num_keys = sum(rows * longest for rows, longest in packed.buckets)
        num_queries = sum(mask.shape[0] * mask.shape[2] for mask in masks)
        query = _ToSlots.apply(query, packed.slots, num_queries)
        key, value = (
            _ToSlots.apply(GatherTokens.apply(x, context.group), context.key_slots, num_keys)
            for x in (key, value)
        )
        outputs = []
        for q, k, v, mask in zip(
            query.split([mask.shape[0] * mask.shape[2] for mask in masks]),
            *(x.split([rows * longest for rows, longest in packed.buckets]) for x in (key, value)),
            masks,
            strict=True,
        ):
            q, k, v = (x.unflatten(0, (len(mask), -1)).transpose(1, 2) for x in (q, k, v))
            output = self._attend_where(mask, q, k, v)
            outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1))
        return _FromSlots.apply(torch.cat(outputs), packed.slots)
