"""An engine for tests that computes with low-rank factors beside its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gapo_megatron.config import AdapterConfig
from gapo_megatron.errors import RolloutError
from gapo_megatron.rollout.engine import Needs
from gapo_megatron.rollout.factors import check_factors, factor_shapes
from gapo_megatron.types import Factors
from tests.adapter_setup import with_factors
from tests.transformers_engine import TransformersEngine


class FactorsEngine(TransformersEngine):
    """Computes with factors beside its weights, and counts what it gets."""

    def __init__(self, model: PreTrainedModel, *, rank: int, **settings: Any) -> None:
        super().__init__(model, eos_token_id=0, **settings)
        adapter = AdapterConfig(kind="lora", rank=rank)
        self._shapes = factor_shapes(adapter, model.config)
        self.needs: Needs = "base"
        self.received: list[str] = []
        self._base = model
        self._forgets = False

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], **settings: Any) -> None:
        super().update_weights(tensors, **settings)
        self.received.append("weights")
        self._model, self.needs, self.policy_version = self._base, "factors", -1

    def update_adapter(
        self, factors: Iterable[Factors], *, scale: float, policy_version: int
    ) -> None:
        self._require_awake("update_adapter")
        if self.needs != "factors":
            raise RolloutError(f"update_adapter, but the engine needs {self.needs} weights")
        self.policy_version, held = -1, list(factors)
        check_factors(held, self._shapes)
        self.received.append("factors")
        if not self._forgets:
            self._model = with_factors(self._base, held, scale)
        self.policy_version = policy_version
