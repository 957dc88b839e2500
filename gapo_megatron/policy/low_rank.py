"""The product of two low-rank factors beside a linear layer, on tensor and sequence parallel ranks.

With x the layer's input, T tokens (T / tp of them under sequence parallelism in front of a
column-parallel layer and behind a row-parallel one) and r the rank:

    column-parallel    A [r, in] whole, B [out / tp, r]: z = x A^T, gathered to [T, r]; z B^T
    row-parallel       A [r, in / tp], B [out, r] whole: x A^T summed over ranks, each keeping its
                       tokens under sequence parallelism; z B^T
    whole              A and B whole, for the tokens that this rank has: z = x A^T; z B^T

Only z, of r columns, is communicated. What is whole on every rank gets the gradient of its own
tokens under sequence parallelism, and Megatron-core sums it (`sequence_parallel`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from gapo_megatron.device import float32_products

Parallel = Literal["column", "row", "whole", "expert"]


class LowRank(nn.Module):
    """Factors A and B beside one linear layer.

    Attributes:
        lora_a: [r, in], of a row-parallel layer [r, in / tp].
        lora_b: [out, r], of a column-parallel layer [out / tp, r].
        scale: factor of B A.
    """

    def __init__(
        self,
        lora_a: Tensor,
        lora_b: Tensor,
        *,
        scale: float,
        parallel: Parallel,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> None:
        """Take the initial shards of the factors, in the layer's dtype and on its device.

        Args:
            lora_a: see the class.
            lora_b: see the class.
            scale: see the class.
            parallel: how tensor parallelism cuts the layer; `whole`: every rank has it; `expert`:
                one rank has it.
            tp_group: the tensor parallel group.
            sequence_parallel: whether activations between the layers are sharded by tokens.
        """
        super().__init__()
        self.lora_a, self.lora_b = nn.Parameter(lora_a), nn.Parameter(lora_b)
        self.scale = scale
        self._parallel = parallel
        self._tp_group = tp_group
        self._is_sharded_by_tokens = sequence_parallel
        for factor, dim in ((self.lora_a, 1), (self.lora_b, 0)):
            is_cut = parallel == ("row" if dim == 1 else "column")
            marks: Any = factor
            marks.tensor_model_parallel = is_cut  # otherwise the norm counts one rank's alone
            marks.partition_dim, marks.partition_stride = (dim if is_cut else -1), 1
            marks.sequence_parallel = sequence_parallel and not is_cut

    def added_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y + scale * (x A^T) B^T, with one rounding of the sum to the dtype of y.

        Args:
            y: the layer's output, [..., out]; of a column-parallel layer [..., out / tp].
            x: the layer's input, [..., in]; of a row-parallel layer [..., in / tp].

        Collectives, over the tensor parallel group, of z with r columns: forward or backward a sum,
        a gather or a reduce-scatter; see the module.
        """
        z = self._between(x.reshape(-1, x.shape[-1]) @ self.lora_a.T)
        sum_ = torch.addmm(y.reshape(-1, y.shape[-1]), z, self.lora_b.T, alpha=self.scale)
        return sum_.view(y.shape)

    def _between(self, z: Tensor) -> Tensor:
        """Return what B multiplies: x A^T of all tokens of the layer's output on this rank."""
        group = self._tp_group
        if self._parallel in ("whole", "expert") or group.size() == 1:
            return z
        if self._parallel == "column":
            if self._is_sharded_by_tokens:
                # Backward: every rank has a part of the sum over B's rows, for all tokens.
                return gather_from_sequence_parallel_region(
                    z, tensor_parallel_output_grad=True, group=group
                )
            return copy_to_tensor_model_parallel_region(z, group=group)
        if self._is_sharded_by_tokens:
            return reduce_scatter_to_sequence_parallel_region(z, group=group)
        return reduce_from_tensor_model_parallel_region(z, group=group)


@torch.no_grad()
def merge(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """W + scale * B A, of the weight's dtype, rounded once.

    Args:
        weight: W [out, in], 16 to 64 bits, whole or a shard.
        a: A [r, in] of the same part.
        b: B [out, r] of the same part.
        scale: factor of B A.
    """
    wide = torch.float32 if weight.itemsize < 4 else torch.float64
    a, b = a.to(weight.device, wide), b.to(weight.device, wide)
    with float32_products(weight.device):  # also within a sync, where the precision is vLLM's
        return torch.addmm(weight.to(wide), b, a, alpha=scale).to(weight.dtype)


@torch.no_grad()
def merge_squares(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Sums of squares over a weight: of the update, and of what rounding in `merge` changes.

    Returns:
        [2] float64 on the weight's device: sum (scale * B A) ** 2, and the sum of the squared
        differences of `merge` from the exact W + scale * B A.
    """
    # Wide enough that the sum's own rounding is small beside that of the result.
    wide = torch.float32 if weight.dtype.itemsize == 2 else torch.float64
    with float32_products(weight.device):
        update = scale * (b.to(weight.device, wide) @ a.to(weight.device, wide))
    lost = merge(weight, a, b, scale=scale).to(wide) - (weight.to(wide) + update)
    return torch.stack([one.square().sum(dtype=torch.float64) for one in (update, lost)])


def relative_rounding(squares: Tensor) -> float:
    """Size of the rounding errors relative to the update's, from sums of `merge_squares`.

    At 1 the rounding is as large as the update; 0 without an update.
    """
    update, rounding = squares.tolist()
    return float((rounding / update) ** 0.5) if update else 0.0
