"""Undocumented parts of Megatron-core in use: experts with biases, and their activation."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

__all__ = ["quick_gelu", "repair_expert_biases", "uncompiled"]


def repair_expert_biases(model: nn.Module) -> None:
    """Let biases of experts be trained, if they have any: on one tensor parallel rank, on several.

    An expert adds its bias in place to the output of a linear layer. Where that is what a
    collective over one rank returned, autograd forbids it; here no such collective is called. And
    under sequence parallelism Megatron-core sums the gradient of a row-parallel bias over tensor
    parallel ranks, though they have other experts.
    """
    # Uses: MoELayer.config, .experts; RowParallelLinear.explicit_expert_comm, .tp_group;
    #     Parameter.sequence_parallel
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.config.add_bias_linear:
            for parameter in layer.experts.parameters():
                parameter.sequence_parallel = False
            for module in layer.experts.modules():
                if isinstance(module, RowParallelLinear) and module.tp_group.size() == 1:
                    module.explicit_expert_comm = True


def uncompiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An activation without torch.compile, which would start a C++ compiler at its first call."""
    # Uses: that Megatron-core's jit_fuser is torch.compile; its _torchdynamo_orig_callable
    # Versions: megatron-core 0.19.2, torch 2.13.0
    # Upstream: none found
    plain: Callable[..., Tensor] = getattr(function, "_torchdynamo_orig_callable", function)
    return plain
