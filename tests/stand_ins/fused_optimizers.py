"""Policies with apex's or Transformer Engine's optimizer on a CPU: stand-ins for their kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from megatron.core.tensor_parallel import layers

from gapo_megatron.compat import transformer_engine
from gapo_megatron.policy import optimizer
from tests.doctor_setup import NVIDIA_APEX

TRANSFORMER_ENGINE = "transformer_engine.pytorch.optimizers"


@contextmanager
def stand_ins(*, engine: bool = True) -> Iterator[Any]:
    """Both libraries whole, on a device that counts as a GPU; yields the counter of kernel calls.

    Args:
        engine: with Transformer Engine's optimizer; its layers are never there.
    """
    with ExitStack() as undo:
        undo.enter_context(patch.object(sys, "path", [str(NVIDIA_APEX), *sys.path]))
        importlib.invalidate_caches()
        undo.callback(_forget)
        undo.enter_context(patch.object(optimizer, "has_gpu", lambda device: True))
        undo.enter_context(patch.object(transformer_engine, "is_installed", lambda: engine))
        if engine:
            module = {TRANSFORMER_ENGINE: _transformer_engine()}
            undo.enter_context(patch.dict(sys.modules, module))
        # Imported before, when apex was not there.
        fused = importlib.import_module("fused_weight_gradient_mlp_cuda")
        undo.enter_context(
            patch.object(layers, "fused_weight_gradient_mlp_cuda", fused, create=True)
        )
        yield importlib.import_module("multi_tensor_kernels").calls


def _forget() -> None:
    """Let the next import look again."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(NVIDIA_APEX)):
            del sys.modules[name]


def _transformer_engine() -> ModuleType:
    """Its optimizer is apex's with keywords alone, and steps that every group counts (#3318)."""
    apex = importlib.import_module("apex.optimizers").FusedAdam
    kernels = importlib.import_module("multi_tensor_kernels")

    class FusedAdam(apex):  # type: ignore[misc, valid-type]
        counts_steps_of_empty_groups = True

        def __init__(self, params: Any, *, capturable: bool, **settings: Any) -> None:
            assert not capturable and settings.keys() <= {
                *("lr", "weight_decay", "betas", "eps", "adam_w_mode", "bias_correction")
            }
            super().__init__(params, **settings)
            self.multi_tensor_adam = kernels.multi_tensor_adam

    module: Any = ModuleType(TRANSFORMER_ENGINE)
    module.FusedAdam = FusedAdam
    module.multi_tensor_applier = importlib.import_module(
        "apex.multi_tensor_apply"
    ).multi_tensor_applier
    module.multi_tensor_l2norm = kernels.multi_tensor_l2norm
    module.multi_tensor_scale = kernels.multi_tensor_scale
    module.multi_tensor_scale_tensor = lambda size, flag, lists, scale: kernels.multi_tensor_scale(
        size, flag, lists, float(scale)
    )
    return module
