"""Whose AdamW, multi-tensor kernels and weight gradients Megatron-core uses for a policy.

Megatron-core takes what it finds when it is imported, in every module anew: Transformer Engine's,
else apex's, else torch's. Here each optimizer has its own. With apex: NOT YET RUN on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from megatron.core import optimizer as core
from megatron.core import utils
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import nn

Implementation = Literal["transformer_engine", "apex", "torch"]


@contextlib.contextmanager
def in_use(implementation: Implementation) -> Iterator[None]:
    """Let Megatron-core's optimizer be of one library within the block.

    What was there before is put back, so that other optimizers of the process keep theirs.
    """
    # Uses: what `_choice` names
    # Versions: megatron-core 0.19.2
    # Upstream: as of `_choice`
    with contextlib.ExitStack() as undo:
        for module, names in _choice(implementation).items():
            for name, value in names.items():
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        yield


def keep(optimizer: MegatronOptimizer, implementation: Implementation) -> None:
    """Let an optimizer that was built within `in_use` compute, save and load likewise."""
    # Uses: ChainedOptimizer.chained_optimizers; get_grad_norm, state_dict, sharded_state_dict,
    #     load_state_dict, replaced: the methods that look up what `_choice` sets
    # Versions: megatron-core 0.19.2
    # Upstream: as of `_choice`
    for part in {optimizer, *getattr(optimizer, "chained_optimizers", ())}:
        for name in ("get_grad_norm", "state_dict", "sharded_state_dict", "load_state_dict"):
            setattr(part, name, in_use(implementation)(getattr(part, name)))
    optimizer.implementation = implementation


def implementation_of(optimizer: MegatronOptimizer) -> Implementation:
    """The library whose kernels an optimizer keeps."""
    # Uses: an attribute that `keep` sets, and no class of Megatron-core's has
    # Versions: megatron-core 0.19.2
    # Upstream: none needed
    kept: Implementation = optimizer.implementation
    return kept


def _choice(implementation: Implementation) -> dict[Any, dict[str, Any]]:
    """Names to set in Megatron-core's modules so that they use one library."""
    # Uses: optimizer: Adam, USING_PYTORCH_OPTIMIZER; distrib_optimizer: Adam, HAVE_APEX_OR_TE,
    #     USING_TE_OPTIMIZER, USING_APEX_OPTIMIZER; clip_grads: multi_tensor_applier, l2_norm_impl,
    #     multi_tensor_scale_impl, multi_tensor_scale_tensor_impl; utils: local_multi_tensor_*
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    scale_tensor = None
    if implementation == "torch":
        adam: Any = torch.optim.AdamW
        applier: Any = utils.local_multi_tensor_applier
        norm: Any = utils.local_multi_tensor_l2_norm
        scale: Any = utils.local_multi_tensor_scale
    elif implementation == "apex":
        adam = importlib.import_module("apex.optimizers").FusedAdam
        applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        amp = importlib.import_module("amp_C")
        norm, scale = amp.multi_tensor_l2norm, amp.multi_tensor_scale
    else:
        engine = importlib.import_module("transformer_engine.pytorch.optimizers")
        adam, applier = engine.FusedAdam, engine.multi_tensor_applier
        norm, scale = engine.multi_tensor_l2norm, engine.multi_tensor_scale
        scale_tensor = engine.multi_tensor_scale_tensor
    return {
        core: {"Adam": adam, "USING_PYTORCH_OPTIMIZER": implementation == "torch"},
        distrib_optimizer: {
            "Adam": adam,
            "HAVE_APEX_OR_TE": implementation != "torch",
            "USING_TE_OPTIMIZER": implementation == "transformer_engine",
            "USING_APEX_OPTIMIZER": implementation == "apex",
        },
        clip_grads: {
            "multi_tensor_applier": applier,
            "l2_norm_impl": norm,
            "multi_tensor_scale_impl": scale,
            "multi_tensor_scale_tensor_impl": scale_tensor,
        },
    }


def fuse_weight_gradients_by_apex(model: nn.Module) -> None:
    """Let Megatron-core's own linears accumulate into `main_grad` in the GEMM itself, by apex.

    As `transformer_engine.fuse_weight_gradients` does for those of Transformer Engine. The field of
    TransformerConfig would be one of both.
    """
    # Uses: ColumnParallelLinear.gradient_accumulation_fusion, and RowParallelLinear's, from the
    #     field of this name; they call fused_weight_gradient_mlp_cuda
    # Versions: megatron-core 0.19.2, apex 0.1 at 6424da3
    # Upstream: none found
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True  # type: ignore[assignment]
