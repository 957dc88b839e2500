"""The ways in which a Megatron parameter is made of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models.rules import Rule, Shape, concatenate

if TYPE_CHECKING:
    from torch import Tensor

    from gapo_megatron.models.geometry import Geometry


def same(megatron: str, hf: str, shape: Shape, *, tp_dim: int | None = None, **flags: Any) -> Rule:
    """The same tensor under two names."""
    return Rule(
        megatron, (hf,), (shape,), tp_dim, join=lambda t: t[0], part=lambda full: (full,), **flags
    )


def fused_qkv(megatron: str, hf: tuple[str, str, str], geometry: Geometry) -> Rule:
    """Query, key, value -> linear_qkv, interleaved by key/value group.

    Megatron stores, for each key/value head, its query heads, then the key head, then the value
    head; tensor parallelism cuts between these groups. Weights are [heads * head_dim, hidden],
    biases [heads * head_dim].
    """
    groups, head_dim = geometry.kv_heads, geometry.head_dim
    if geometry.heads % groups:
        raise ConfigError(
            f"config.json: num_key_value_heads ({groups}) must divide "
            f"num_attention_heads ({geometry.heads})"
        )
    rest = () if hf[0].endswith(".bias") else (geometry.hidden,)
    # `join` and `part` do not ask for the columns: an adapter's factors have others.
    sizes = [geometry.heads // groups * head_dim, head_dim, head_dim]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return concatenate([t.unflatten(0, (groups, -1)) for t in tensors], dim=1).flatten(0, 1)

    def part(full: Tensor) -> tuple[Tensor, ...]:
        grouped = full.unflatten(0, (groups, -1))
        return tuple(t.flatten(0, 1) for t in grouped.split(sizes, dim=1))

    shapes = tuple((groups * size, *rest) for size in sizes)
    return Rule(megatron, hf, shapes, 0, join=join, part=part, num_layers=geometry.num_layers)


def gated(megatron: str, hf: tuple[str, str], shape: Shape, **flags: Any) -> Rule:
    """Gate and up projection -> linear_fc1, concatenated in dimension 0."""
    return Rule(
        megatron,
        hf,
        (shape, shape),
        0,
        join=concatenate,
        part=lambda full: full.chunk(2),
        glu=True,
        **flags,
    )
