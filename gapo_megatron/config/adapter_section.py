"""Section of the configuration on adapters: which weights a run trains."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gapo_megatron.config.section import FIXED, Section
from gapo_megatron.config.types import Positive

Target = Literal["qkv", "proj", "fc1", "fc2", "experts", "latent"]
Targets = Annotated[tuple[Target, ...], Field(strict=False, min_length=1)]


class AdapterConfig(Section):
    """Which weights are trained: all, or thin factors beside frozen ones (docs/lora.md)."""

    role = FIXED
    kept = (
        "a checkpoint holds every weight, or the factors of one adapter, and neither continues as "
        "the other"
    )

    kind: Literal["none", "lora"] = "none"
    """`none`: every weight is trained. `lora`: W + scale * B A with W frozen, A [rank, in] and B
    [out, rank] (arXiv 2106.09685)."""
    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the factors."""
    alpha: Positive = 32.0
    """Numerator of the scale: alpha / rank."""
    rank_stabilized: bool = False
    """Scale alpha / sqrt(rank) instead: the update's size then does not shrink with the rank
    (rsLoRA, arXiv 2312.03732)."""
    targets: Targets = ("qkv", "proj", "fc1", "fc2")
    """Linear layers with factors: `qkv` and `proj` of attention, `fc1` (gate and up projection) and
    `fc2` of a dense MLP or a shared expert, `experts`: both of every expert, `latent`: the down
    projections of latent attention. The model must have every one that is named (docs/lora.md)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets ({[*self.targets]!r}) must name each layer once")
        if self.kind == "none":
            for name, field in type(self).model_fields.items():
                if (value := getattr(self, name)) != field.default:
                    shown = [*value] if isinstance(value, tuple) else value
                    raise ValueError(f"{name} ({shown!r}) needs kind 'lora', not 'none'")
        return self

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return lora_scale(self.rank, self.alpha, rank_stabilized=self.rank_stabilized)


def lora_scale(rank: int, alpha: float, *, rank_stabilized: bool) -> float:
    """Factor of B A: alpha / rank (arXiv 2106.09685), or alpha / sqrt(rank) (arXiv 2312.03732)."""
    return alpha / (math.sqrt(rank) if rank_stabilized else rank)
