"""Name rules: which Hugging Face tensors make which Megatron-core parameter, and how it is sharded.

An architecture is a table of `Rule`s (`qwen2.py`, `llama.py`). Import at start, weight sync to the
rollout engine and export all read the same table, so a tensor cannot be right in one and wrong in
another. Nothing here knows of processes or devices: names and tensors in, names and tensors out.

Layer numbers are global. A pipeline stage adds its offset before it asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapo_megatron.errors import ConversionError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a dense decoder that decide tensor shapes."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Not always hidden / heads."""
    intermediate: int
    vocab: int
    tied: bool
    """The output layer is the embedding."""

    @classmethod
    def of(cls, hf_config: Any) -> Geometry:
        """Read the sizes off a Hugging Face config (any object with its attributes)."""
        heads = hf_config.num_attention_heads
        return cls(
            num_layers=hf_config.num_hidden_layers,
            hidden=hf_config.hidden_size,
            heads=heads,
            kv_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
            intermediate=hf_config.intermediate_size,
            vocab=hf_config.vocab_size,
            tied=bool(hf_config.tie_word_embeddings),
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    `full` below is the whole Megatron parameter, as tensor parallel size 1 holds it, without
    vocabulary padding.
    """

    megatron: str
    """Parameter name in GPTModel with our layer spec; `{layer}` where it repeats."""
    hf: tuple[str, ...]
    """Hugging Face names, in the order `merge` takes and `split` returns them."""
    hf_shapes: tuple[Shape, ...]
    tp_dim: int | None
    """Dimension that tensor parallelism cuts; None: every rank holds the whole."""
    join: Callable[[Sequence[Tensor]], Tensor]
    part: Callable[[Tensor], tuple[Tensor, ...]]
    """Inverse of `join`, bit for bit."""
    num_layers: int | None = None
    """How often the rule repeats; None: once in the model."""
    te_name: str | None = None
    """Name under Transformer Engine's layer spec, where norms live inside the next linear."""
    glu: bool = False
    """`full` is [gate; up]: both halves are cut, and a rank holds [its gate; its up]."""
    vocab_padded: bool = False
    """Rows are padded with zeros up to a multiple of the tensor parallel size."""
    tied: bool = False
    """A second home for a tensor another rule owns: filled on import, skipped on export."""

    @property
    def layers(self) -> Iterable[int | None]:
        """Every value `layer` takes."""
        return (None,) if self.num_layers is None else range(self.num_layers)

    def megatron_name(self, layer: int | None = None) -> str:
        """Name of the parameter in global layer `layer`."""
        return self.megatron.format(layer=layer)

    def hf_names(self, layer: int | None = None) -> tuple[str, ...]:
        """Hugging Face names of layer `layer`."""
        return tuple(name.format(layer=layer) for name in self.hf)

    @property
    def full_shape(self) -> Shape:
        """Shape of the whole Megatron parameter, without vocabulary padding."""
        return (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])

    def shard_shape(self, size: int) -> Shape:
        """Shape of one tensor parallel rank's shard.

        Raises:
            ConversionError: the dimension cannot be cut into `size` equal parts.
        """
        shape = list(self.full_shape)
        if self.tp_dim is None:
            return tuple(shape)
        if self.vocab_padded:
            shape[self.tp_dim] += -shape[self.tp_dim] % size
        parts = 2 * size if self.glu else size
        if shape[self.tp_dim] % parts:
            raise ConversionError(
                f"{self.megatron}: dimension {self.tp_dim} of {self.full_shape} "
                f"cannot be cut into {size} equal tensor parallel shards"
            )
        shape[self.tp_dim] //= size
        return tuple(shape)

    def merge(self, tensors: Sequence[Tensor], *, layer: int | None = None) -> Tensor:
        """Join whole Hugging Face tensors into the whole Megatron parameter.

        Raises:
            ConversionError: a tensor is missing or has another shape than the config says.
        """
        names = self.hf_names(layer)
        if len(tensors) != len(names):
            raise ConversionError(
                f"{self.megatron_name(layer)} is made of {len(names)} tensors "
                f"({', '.join(names)}), not of {len(tensors)}"
            )
        for name, tensor, shape in zip(names, tensors, self.hf_shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise ConversionError(_misshapen(name, tensor, shape))
        return self.join(tensors)

    def split(self, full: Tensor, *, layer: int | None = None) -> tuple[Tensor, ...]:
        """Cut a whole Megatron parameter into Hugging Face tensors (order of `hf`).

        Raises:
            ConversionError: `full` has another shape than the config says.
        """
        if tuple(full.shape) != self.full_shape:
            raise ConversionError(_misshapen(self.megatron_name(layer), full, self.full_shape))
        return self.part(full)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The part of a whole parameter that tensor parallel rank `rank` of `size` holds."""
        shape = self.shard_shape(size)
        if self.tp_dim is None:
            return full
        if self.vocab_padded and (padding := shape[0] * size - full.shape[0]):
            full = torch.cat([full, full.new_zeros(padding, *full.shape[1:])])
        if self.glu:
            halves = [half.chunk(size)[rank] for half in full.chunk(2)]
            return torch.cat(halves)
        return full.chunk(size, dim=self.tp_dim)[rank].contiguous()

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Inverse of `shard`: the whole parameter from the shards of all ranks, in rank order."""
        shape = self.shard_shape(len(shards))
        for rank, shard in enumerate(shards):
            if tuple(shard.shape) != shape:
                raise ConversionError(
                    f"{self.megatron}: the shard of tensor parallel rank {rank} of {len(shards)} "
                    f"has shape {list(shard.shape)}; it must be {list(shape)}"
                )
        if self.tp_dim is None or len(shards) == 1:
            full = shards[0]
        elif self.glu:
            gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
            full = torch.cat([*gates, *ups])
        else:
            full = torch.cat(list(shards), dim=self.tp_dim)
        return full[: self.full_shape[0]] if self.vocab_padded else full


def find_rule(rules: Sequence[Rule], megatron_name: str) -> tuple[Rule, int | None]:
    """The rule of a Megatron parameter and its global layer (None outside the layers).

    Takes the names of our layer spec and of Transformer Engine's.

    Raises:
        ConversionError: no rule, or no layer of that number.
    """
    number = re.search(r"(?<=\.layers\.)\d+", megatron_name)
    layer = int(number.group()) if number else None
    template = re.sub(r"(?<=\.layers\.)\d+", "{layer}", megatron_name)
    for rule in rules:
        if template in (rule.megatron, rule.te_name) and layer in rule.layers:
            return rule, layer
    raise ConversionError(f"no rule converts the Megatron parameter {megatron_name}")


def to_megatron(
    rules: Sequence[Rule], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Stream Hugging Face tensors in, whole Megatron parameters out.

    A parameter leaves as soon as its last tensor has come; only incomplete ones are held. Tied
    models yield `output_layer.weight` too (the last pipeline stage keeps its own copy).

    Args:
        rules: of the architecture.
        tensors: (Hugging Face name, whole tensor), any order.

    Yields:
        (Megatron name in our layer spec with the global layer number, whole tensor).

    Raises:
        ConversionError: a tensor without a place, twice, misshapen, or (at the end) missing.
    """
    homes: dict[str, list[tuple[Rule, int | None]]] = {}
    for rule in rules:
        for layer in rule.layers:
            for name in rule.hf_names(layer):
                homes.setdefault(name, []).append((rule, layer))
    is_tied = any(rule.tied for rule in rules)
    waiting: dict[str, dict[str, Tensor]] = {}
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in homes:
            if _is_redundant(name, tied=is_tied):
                continue
            raise ConversionError(f"{name} has no place in the model that config.json describes")
        if name in seen:
            raise ConversionError(f"{name} occurs twice")
        seen.add(name)
        for rule, layer in homes[name]:
            target = rule.megatron_name(layer)
            parts = waiting.setdefault(target, {})
            parts[name] = tensor
            if len(parts) == len(rule.hf):
                del waiting[target]
                yield target, rule.merge([parts[n] for n in rule.hf_names(layer)], layer=layer)
    check_names(rules, seen)


def to_hf(
    rules: Sequence[Rule], parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Stream whole Megatron parameters in, Hugging Face tensors out (tied copies left out).

    Raises:
        ConversionError: a parameter without a rule, misshapen, or (at the end) missing.
    """
    seen: set[str] = set()
    for megatron_name, full in parameters:
        rule, layer = find_rule(rules, megatron_name)
        if rule.tied:
            continue
        names = rule.hf_names(layer)
        seen.update(names)
        yield from zip(names, rule.split(full, layer=layer), strict=True)
    check_names(rules, seen)


def hf_shapes(rules: Sequence[Rule]) -> dict[str, Shape]:
    """Every Hugging Face tensor of the model, once, with its shape, in the order of the table."""
    return {
        name: shape
        for rule in rules
        if not rule.tied
        for layer in rule.layers
        for name, shape in zip(rule.hf_names(layer), rule.hf_shapes, strict=True)
    }


def checked(
    rules: Sequence[Rule], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Pass Hugging Face tensors through, provided they are exactly the model's.

    Raises:
        ConversionError: a tensor is extra, twice or misshapen, or (at the end) missing.
    """
    shapes, seen = hf_shapes(rules), set()
    for name, tensor in tensors:
        if name not in shapes:
            raise ConversionError(f"{name} has no place in the model that config.json describes")
        if name in seen:
            raise ConversionError(f"{name} occurs twice")
        if tuple(tensor.shape) != shapes[name]:
            raise ConversionError(_misshapen(name, tensor, shapes[name]))
        seen.add(name)
        yield name, tensor
    check_names(rules, seen)


def check_names(rules: Sequence[Rule], names: Iterable[str]) -> None:
    """Raise ConversionError unless `names` are exactly the model's Hugging Face tensors."""
    given, wanted = set(names), set(hf_shapes(rules))
    if missing := sorted(wanted - given):
        raise ConversionError(f"missing tensors: {_some(missing)}")
    is_tied = any(rule.tied for rule in rules)
    extra = sorted(name for name in given - wanted if not _is_redundant(name, tied=is_tied))
    if extra:
        raise ConversionError(
            f"tensors without a place in the model that config.json describes: {_some(extra)}"
        )


def _is_redundant(name: str, *, tied: bool) -> bool:
    """Tensors some checkpoints carry though the config determines them."""
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _misshapen(name: str, tensor: Tensor, shape: Shape) -> str:
    return f"{name} has shape {list(tensor.shape)}; the model's config says {list(shape)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


# --- the ways a parameter is made --------------------------------------------------------------


def same(megatron: str, hf: str, shape: Shape, *, tp_dim: int | None = None, **flags: Any) -> Rule:
    """One tensor under two names."""
    return Rule(
        megatron, (hf,), (shape,), tp_dim, join=lambda t: t[0], part=lambda full: (full,), **flags
    )


def fused_qkv(megatron: str, hf: tuple[str, str, str], geometry: Geometry, **flags: Any) -> Rule:
    """Query, key, value -> linear_qkv, interleaved by key/value group.

    Megatron keeps what one attention group needs together: for each key/value head its query heads,
    the key head, the value head. Tensor parallelism then cuts between groups. Weights are
    [heads * head_dim, hidden], biases [heads * head_dim].
    """
    groups, head_dim = geometry.kv_heads, geometry.head_dim
    if geometry.heads % groups:
        raise ConversionError(
            f"num_key_value_heads ({groups}) must divide num_attention_heads ({geometry.heads})"
        )
    rest = () if hf[0].endswith(".bias") else (geometry.hidden,)
    sizes = [geometry.heads // groups * head_dim, head_dim, head_dim]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.reshape(groups, -1, *rest) for t in tensors], dim=1).flatten(0, 1)

    def part(full: Tensor) -> tuple[Tensor, ...]:
        grouped = full.reshape(groups, -1, *rest)
        return tuple(t.flatten(0, 1) for t in grouped.split(sizes, dim=1))

    shapes = tuple((groups * size, *rest) for size in sizes)
    return Rule(megatron, hf, shapes, 0, join=join, part=part, **flags)


def gated(megatron: str, hf: tuple[str, str], shape: Shape, **flags: Any) -> Rule:
    """Gate and up projection -> linear_fc1, one above the other."""
    return Rule(
        megatron,
        hf,
        (shape, shape),
        0,
        join=lambda tensors: torch.cat(list(tensors)),
        part=lambda full: full.chunk(2),
        glu=True,
        **flags,
    )


def output_layer(geometry: Geometry) -> Rule:
    """The output layer: a tensor of its own, or the embedding's second home."""
    hf = "model.embed_tokens.weight" if geometry.tied else "lm_head.weight"
    shape = (geometry.vocab, geometry.hidden)
    return same("output_layer.weight", hf, shape, tp_dim=0, vocab_padded=True, tied=geometry.tied)
