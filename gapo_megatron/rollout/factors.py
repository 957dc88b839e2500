"""Which factors an engine accepts: those of every adapted layer once, in the model's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from transformers import PretrainedConfig

from gapo_megatron.config import AdapterConfig
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.formats.weights import finite_extremes
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
    """Refuse factors that `AdapterEngine.update_adapter` promises to refuse.

    Args:
        factors: consumed completely, unless one is refused.
        shapes: shapes of all layers.

    Raises:
        WeightSyncError: a layer's factors are missing, extra, repeated or misshapen; names it.
        ConversionError: a factor is not finite; names it.
    """
    seen: set[str] = set()
    for module, *pair in factors:
        if module not in shapes:
            raise WeightSyncError(f"{module} is no layer with factors")
        if module in seen:
            raise WeightSyncError(f"{module} is given twice")
        seen.add(module)
        for letter, tensor, shape in zip("AB", pair, shapes[module], strict=True):
            if tuple(tensor.shape) != shape:
                raise WeightSyncError(
                    f"{letter} of {module} has shape {list(tensor.shape)}; it must be {list(shape)}"
                )
            finite_extremes(tensor, name=f"{letter} of {module}")
    if missing := sorted(shapes.keys() - seen):
        raise WeightSyncError(f"{len(missing)} layers without factors: {', '.join(missing[:5])}")
