"""Attention sinks: a head's softmax has one score more, a parameter, and its share is lost.

With scores s_j and the sink z the share of key j is exp(s_j) / (exp(z) + sum_k exp(s_k)). The
parameters are Megatron-core's `core_attention.softmax_offset` [N / tp] (softmax_type "learnable").

S sequences, L padded length, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ALIGNMENT = 8
"""Elements that a head grows by; kernels on GPUs want multiples."""


def attend_with_sinks(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    *,
    scale: float,
    attn_mask: Tensor | None,
) -> Tensor:
    """Attention with sinks by a kernel that has none, forward and backward.

    A sink is the score of one more key, of value zero: an element that is added to every head is
    z / scale in all queries, 1 in the added key and 0 in the others. So nothing but the kernel
    stores scores.

    Args:
        attend: takes query, key, value, and `attn_mask` or `is_causal`.
        query: [S, N, L, D].
        key: [S, G, K, D].
        value: [S, G, K, D].
        sinks: [N].
        scale: factor of the attention scores.
        attn_mask: bool, to broadcast to [S, N, L, K]: where a query sees a key; None: causal.

    Returns:
        [S, N, L, D].
    """
    size = query.shape[-1]
    extra = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    query = F.pad(torch.cat([query, extra], dim=-1), (0, _ALIGNMENT - 1))
    # In front, so that every query sees it under a causal mask.
    key, value = (F.pad(x, (0, _ALIGNMENT, 1, 0)) for x in (key, value))
    is_added = F.pad(key.new_ones(1, 1), (size, _ALIGNMENT - 1, 0, key.shape[2] - 1))
    key = key + is_added
    if attn_mask is None:  # a query in front, too, whose output nobody reads
        query = F.pad(query, (0, 0, 1, 0))
        return attend(query, key, value, is_causal=True)[:, :, 1:, :size]
    mask = F.pad(attn_mask, (1, 0), value=True)
    return attend(query, key, value, attn_mask=mask)[..., :size]


def with_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with sinks, from those of a kernel without.

    The kernel's backward pass gives exact gradients of queries, keys and values if it gets these
    two instead of its own: it computes shares from the second, and what they lose from the first.

    Args:
        output: [T, N, D].
        log_sums: [N, T] float32, of every query's scores.
        sinks: [N].

    Returns:
        The same shapes and dtypes.
    """
    total = torch.logaddexp(log_sums, sinks.float()[:, None])
    kept = (log_sums - total).exp().T[..., None]
    return (output * kept).to(output.dtype), total


def gradient_of_sinks(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks [N], of output and log-sum-exp with sinks (`with_sinks`)."""
    shares = (sinks.float()[:, None] - log_sums).exp()
    lost = (grad.float() * output.float()).sum(-1).T
    return -(shares * lost).sum(-1).to(sinks.dtype)


def mark_sinks(model: nn.Module) -> None:
    """Mark the sinks as sharded by heads: otherwise the gradient norm counts one rank's only."""
    for name, parameter in model.named_parameters():
        if name.endswith(".softmax_offset"):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim = 0  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]
