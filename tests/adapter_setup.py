"""Low-rank factors for tests: of transformers' models, and a policy that stands for a trainer's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gapo_megatron.models.lora import FactorRules, rules_of
from gapo_megatron.policy.export import Exported
from gapo_megatron.policy.low_rank import merge
from gapo_megatron.types import Factors
from tests.transfer_setup import exported_of, rule_of

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_factors(
    model: PreTrainedModel,
    *,
    rank: int,
    seed: int,
    size: float = 0.1,
    layers: Sequence[str] = LAYERS,
) -> list[Factors]:
    """Factors of both kinds of layers, A of order 1 / sqrt(in) and B of `size`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in layers:
            a = torch.randn(rank, module.in_features, generator=generator)
            b = torch.randn(module.out_features, rank, generator=generator)
            a, b = a / module.in_features**0.5, b * size
            found.append((name, a.to(module.weight.dtype), b.to(module.weight.dtype)))
    return found


def with_factors(
    model: PreTrainedModel, factors: Sequence[Factors], scale: float
) -> PreTrainedModel:
    """A copy in float64 whose layers compute W x + scale * B (A x), nothing merged."""
    exact = copy.deepcopy(model).double().eval()
    for name, a, b in factors:

        def add(_: Any, inputs: Any, output: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return output + scale * (inputs[0] @ a.double().T @ b.double().T)

        exact.get_submodule(name).register_forward_hook(add)
    return exact


def factor_rules(factors: Sequence[Factors]) -> list[FactorRules]:
    """Rules of layers that have the same name in both models."""
    return [
        FactorRules(
            "fc1",
            rule_of(f"{name}.weight", (b.shape[0], a.shape[1])),
            rule_of(f"{name}.lora_a", tuple(a.shape)),
            rule_of(f"{name}.lora_b", tuple(b.shape)),
        )
        for name, a, b in factors
    ]


@dataclass
class FakeAdapter:
    """What a sync asks of an adapter; its factors may share memory with the policy."""

    factors: list[Factors]
    scale: float
    is_on: bool = True

    def whole_factors(self, stages: Any) -> Iterator[Factors]:
        yield from self.factors

    @property
    def exported(self) -> Exported:
        """The factors as parameters of one rank."""
        return exported_of(rules_of(factor_rules(self.factors)), num_ranks=1)

    def factor_shards(self, stages: Any) -> dict[str, Tensor]:
        named = (
            (f"{name}.lora_{letter}", one)
            for name, *both in self.factors
            for letter, one in zip("ab", both, strict=True)
        )
        return dict(named)

    def merge_rounding(self, stages: Any) -> float:
        return 0.25

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


@dataclass
class FakePolicy:
    """A policy whose memory holds nothing once it has made room."""

    model: PreTrainedModel
    adapter: FakeAdapter | SimpleNamespace
    stages: tuple[()] = ()
    num_weights_sent: int = 0
    made_room: list[str] = field(default_factory=list)

    def iterate_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.num_weights_sent += 1
        tied, merged = self.model.config.tie_word_embeddings, {}
        if isinstance(self.adapter, FakeAdapter) and self.adapter.is_on:
            merged = {f"{name}.weight": (a, b) for name, a, b in self.adapter.factors}
        for name, tensor in self.model.state_dict().items():
            if name in merged:
                yield name, merge(tensor, *merged[name], scale=self.adapter.scale)
            elif not (tied and name == "lm_head.weight"):
                yield name, tensor.clone()

    def begin_pass(self) -> None: ...

    def make_room(self) -> None:
        self.made_room.append("gradients")

    def make_room_of_weights(self) -> None:
        self.made_room.append("weights")
        for _, a, b in self.adapter.factors:
            a.fill_(torch.nan)
            b.fill_(torch.nan)
