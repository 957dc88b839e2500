"""Repairs of vLLM's gpt-oss, which reloads neither attention sinks nor layers with factors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.gpt_oss import GptOssModel


class SinkLoader:
    """Keeps the sinks of a stream of weights, and puts them into a model that was reloaded.

    vLLM's models copy a sink into the parameter itself, which during a reload has no memory, and
    not through its `weight_loader`, which would keep it for later. The reload then restores the old
    sinks and reports no error.
    """

    # Uses: GptOssForCausalLM's modules with a parameter `sinks`, their `attn.impl.sinks`; that its
    #     mapper renames `.self_attn.` to `.attn.`
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#57795, #57805 (open)

    def __init__(self) -> None:
        self._sinks: dict[str, Tensor] = {}

    def watched(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged, and copy the sinks among them."""
        for name, tensor in tensors:
            if name.endswith(".sinks"):
                self._sinks[name.replace(".self_attn.", ".attn.")] = tensor.detach().clone()
            yield name, tensor

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Copy this rank's heads into the model, and into what its attention has made of them."""
        rank = get_tensor_model_parallel_rank()
        modules = dict(model.named_modules())
        for name, whole in self._sinks.items():
            module = modules[name.removesuffix(".sinks")]
            parameter = module.get_parameter("sinks")
            parameter.copy_(whole.narrow(0, rank * len(parameter), len(parameter)))
            # The parameter itself, or a copy of another dtype, made when it was first used.
            kernels_own = module.get_submodule("attn").impl.sinks
            if kernels_own is not parameter:
                kernels_own.copy_(parameter)


@contextlib.contextmanager
def naming_base_layers(model: nn.Module) -> Iterator[None]:
    """Let gpt-oss find the weights of layers with room for an adapter's factors.

    They are parameters of a submodule, `base_layer`, then. Other models' loading looks there; this
    one looks names up, and would end with a KeyError.
    """
    # Uses: that GptOssModel.load_weights calls self.named_parameters, replaced
    # Versions: vllm 0.32.0
    # Upstream: none found
    inner = getattr(model, "model", None)
    if not isinstance(inner, GptOssModel):
        yield
        return
    parameters = inner.named_parameters

    def plainly_named(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in parameters(*args, **kwargs):
            yield name.replace(".base_layer.", "."), parameter

    inner.named_parameters = plainly_named
    try:
        yield
    finally:
        del inner.named_parameters
