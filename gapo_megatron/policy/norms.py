"""Norms of layers without Transformer Engine.

T tokens, H hidden size, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMSNorm that supports sequence parallelism, unlike Megatron-core's own fallback.

    Every rank normalises its part of the sequence. The weight is marked, so that Megatron-core sums
    its gradient over the tensor parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.is_zero_centred = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], same dtype; statistics in float32."""
        if self.is_zero_centred:  # stored less 1, and added in float32 or more
            wide = torch.promote_types(x.dtype, torch.float32)
            weight = 1 + self.weight.to(wide)
            return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class NormedAdd(nn.Module):
    """Adds the norm of a sublayer's output to its input: x + norm(f(x)).

    Takes the place of Megatron-core's bias-dropout-add, which has neither here.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, is_fused: bool) -> Callable[..., Tensor]:
        """The function that Megatron-core calls."""
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], x: Tensor, dropout: float) -> Tensor:
        """f(x) [T, 1, H] with its bias, and x [T, 1, H] -> [T, 1, H]."""
        values, bias = output
        assert bias is None and dropout == 0.0
        return x + self.norm(values)


class HeadsNorm(nn.Module):
    """RMSNorm over all heads of a token together, of which a rank has a part.

    The mean square is that of all ranks' heads. The weight is whole on every rank, which uses its
    heads' part: Megatron-core sums the gradients of all weights with these modules' names over the
    tensor parallel group.

    Attributes:
        tp_group: ranks that share the heads; set after Megatron-core has built the model.
    """

    tp_group: dist.ProcessGroup

    def __init__(self, config: Any, num_heads: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        width = num_heads * config.kv_channels
        self.weight = nn.Parameter(torch.empty(width, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., N / tp, D] -> the same shape and dtype; computed in float32 or more.

        Collectives, over the tensor parallel group: a sum of one number per token; backward
        another.
        """
        wide = x.flatten(-2).to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            # Every rank's output depends on the sum.
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = wide * torch.rsqrt(squares / len(self.weight) + self.eps)
        weight = self.weight.chunk(self.tp_group.size())[self.tp_group.rank()]
        return (weight * normed).to(x.dtype).view(x.shape)


class QueryNorm(HeadsNorm):
    """Norm over all query heads."""

    def __init__(self, config: Any, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(config, config.num_attention_heads, eps)


class KeyNorm(HeadsNorm):
    """Norm over all key heads."""

    def __init__(self, config: Any, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(config, config.num_query_groups, eps)
