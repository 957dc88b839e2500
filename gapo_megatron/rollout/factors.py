"""Which factors an engine accepts: those of every adapted layer once, in the model's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from transformers import PretrainedConfig

from gapo_megatron.config import AdapterConfig
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.models.lora import factors_of
from gapo_megatron.models.rules import Shape
from gapo_megatron.models.tables import rules_for
from gapo_megatron.types import Factors

FactorShapes = Mapping[str, tuple[Shape, Shape]]
"""Shapes of A [rank, in] and B [out, rank] of every adapted layer, by the layer's name in the
Hugging Face model."""


def factor_shapes(adapter: AdapterConfig, hf_config: PretrainedConfig) -> FactorShapes:
    """Shapes of the factors of section `adapter`."""
    return {
        name.removesuffix(".weight"): (one.a.hf_shapes[0], shape)
        for one in factors_of(rules_for(hf_config), targets=adapter.targets, rank=adapter.rank)
        for place in one.weight.places
        for name, shape in zip(one.weight.hf_names(place), one.b.hf_shapes, strict=True)
    }


def check_factors(factors: Iterable[Factors], shapes: FactorShapes) -> None:
    """Refuse other factors than those of `shapes`.

    Raises:
        WeightSyncError: a layer's factors are missing, extra or misshapen; names it.
    """
    found = {module: (tuple(a.shape), tuple(b.shape)) for module, a, b in factors}
    names = sorted(found.keys() | shapes.keys())
    if odd := [name for name in names if found.get(name) != shapes.get(name)]:
        raise WeightSyncError(
            f"{len(odd)} layers whose factors are not of the model's shapes: "
            + ", ".join(
                f"{name}, {found.get(name)} instead of {shapes.get(name)}" for name in odd[:5]
            )
        )
