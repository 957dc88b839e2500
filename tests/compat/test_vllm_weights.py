"""vLLM's own reload of weights, after one that was interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import layerwise

from gapo_megatron.compat.vllm_weights import forget_interrupted

ROWS = {"q": slice(0, 3), "k": slice(3, 4), "v": slice(4, 6)}


class Fused(nn.Module):
    """A module whose weight arrives in three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 2), requires_grad=False)
        cast(Any, self.weight).weight_loader = self.load_part

    @staticmethod
    def load_part(param: nn.Parameter, loaded_weight: Tensor, part: str) -> None:
        param.data[ROWS[part]].copy_(loaded_weight)


def reload(model: nn.Module, values: Mapping[str, float], *, ends: bool) -> None:
    layerwise.initialize_layerwise_reload(model)
    weight = cast(Any, model.get_parameter("0.weight"))  # models find their parameters once
    for part, value in values.items():
        rows = ROWS[part]
        weight.weight_loader(weight, torch.full((rows.stop - rows.start, 2), value), part)
    if ends:
        config = cast(Any, SimpleNamespace(dtype=torch.float32))
        layerwise.finalize_layerwise_reload(model, config)


@pytest.mark.parametrize("arrived", [{"q": 1.0}, {"q": 1.0, "k": 1.0}])
def test_all_parts_of_a_module_come_again(arrived: Mapping[str, float]) -> None:
    model = nn.Sequential(Fused())
    address = model.get_parameter("0.weight").data_ptr()
    layerwise.record_metadata_for_reloading(model)
    reload(model, arrived, ends=False)
    forget_interrupted(model)
    reload(model, {"q": 2.0, "k": 3.0, "v": 4.0}, ends=True)
    weight = model.get_parameter("0.weight")
    assert weight[:, 0].tolist() == [2, 2, 2, 3, 4, 4]
    assert weight.data_ptr() == address, "graphs read it there"
