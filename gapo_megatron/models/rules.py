"""Name rules: which Hugging Face tensors form which Megatron-core parameter, and how it is sharded.

An architecture's file lists its `Rule`s; `tables.rules_for` returns those of a model. Loading,
weight sync to the rollout engine, export and the conversion tools all use the same rules, so they
cannot disagree about a tensor. The functions here map names and tensors, independent of processes
and devices.

Layer and expert numbers are global; a rank adds its offsets first.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gapo_megatron.errors import ConversionError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class Place(NamedTuple):
    """The layer and expert to which a rule is applied."""

    layer: int | None = None
    """Global number; None outside the layers."""
    expert: int | None = None
    """Global number; None outside the experts."""

    def fill(self, template: str) -> str:
        """Insert the numbers into a template of a name."""
        return template.format(layer=self.layer, expert=self.expert)


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that form it.

    `full` below is the whole Megatron parameter, as tensor parallel size 1 holds it, without
    vocabulary padding.
    """

    megatron: str
    """Parameter name in GPTModel with our layer spec; `{layer}` and `{expert}` if it repeats."""
    hf: tuple[str, ...]
    """Hugging Face names, in the order of `merge` and `split`."""
    hf_shapes: tuple[Shape, ...]
    tp_dim: int | None
    """Dimension that tensor parallelism shards; None: replicated."""
    join: Callable[[Sequence[Tensor]], Tensor]
    part: Callable[[Tensor], tuple[Tensor, ...]]
    """Inverse of `join`, bit for bit."""
    num_layers: int | None = None
    """Number of the model's layers; None: the parameter is outside the layers."""
    in_layers: range | None = None
    """In a model whose layers differ, those that have the parameter; None: they are all alike."""
    num_experts: int | None = None
    """Number of experts per layer that have it; None: it is outside the experts."""
    te_name: str | None = None
    """Name under Transformer Engine's layer spec, if different: norms are part of the next linear,
    experts of one grouped linear."""
    glu: bool = False
    """`full` is [gate; up]; each half is sharded, and a rank holds [its gate; its up]."""
    vocab_padded: bool = False
    """Rows are padded with zeros up to a multiple of the tensor parallel size."""
    tied: bool = False
    """A copy of another rule's tensor: filled on load, skipped on export."""
    is_buffer: bool = False
    """A buffer of the model, which is never trained and stays in float32 in every precision."""
    shape: Shape | None = None
    """Shape of `full`; None: the Hugging Face tensors one below the other."""

    @property
    def layers(self) -> range:
        """Numbers of the layers that have the parameter; empty outside the layers."""
        return range(self.num_layers or 0) if self.in_layers is None else self.in_layers

    def count_in(self, layers: range) -> int:
        """How many of these layers have the parameter."""
        first, stop = max(self.layers.start, layers.start), min(self.layers.stop, layers.stop)
        return max(0, stop - first)

    @property
    def num_places(self) -> int:
        """Number of all places of the rule."""
        return (1 if self.num_layers is None else len(self.layers)) * (self.num_experts or 1)

    @property
    def places(self) -> list[Place]:
        """All places of the rule, in order."""
        layers = [None] if self.num_layers is None else self.layers
        experts = [None] if self.num_experts is None else range(self.num_experts)
        return [Place(*numbers) for numbers in itertools.product(layers, experts)]

    def reaches(self, place: Place) -> bool:
        """Whether the rule applies to this layer and expert."""
        has_layer = place.layer is None or place.layer in self.layers
        return has_layer and (place.expert or 0) < (self.num_experts or 1)

    def place_in(self, megatron_name: str) -> Place | None:
        """The numbers in a parameter's name, of either layer spec; None: it is not this rule's."""
        for template in (self.megatron, self.te_name):
            found = template and _pattern(template).fullmatch(megatron_name)
            if found:
                return Place(**{key: int(number) for key, number in found.groupdict().items()})
        return None

    def megatron_name(self, place: Place) -> str:
        """Name of the parameter at a place."""
        return place.fill(self.megatron)

    def hf_names(self, place: Place) -> tuple[str, ...]:
        """Hugging Face names at a place."""
        return tuple(place.fill(name) for name in self.hf)

    @property
    def full_shape(self) -> Shape:
        """Shape of the whole Megatron parameter, without vocabulary padding."""
        return self.shape or (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])

    @property
    def half_shape(self) -> Shape:
        """Shape of gate or up, the halves of `full` if it has them (`glu`)."""
        return (self.full_shape[0] // 2, *self.full_shape[1:])

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

    def merge(self, tensors: Sequence[Tensor], place: Place) -> Tensor:
        """Join whole Hugging Face tensors into the whole Megatron parameter.

        Raises:
            ConversionError: a tensor is missing, has another shape than in the config, or
                another dtype than the others (joining would cast it).
        """
        names = self.hf_names(place)
        if len(tensors) != len(names):
            raise ConversionError(
                f"{self.megatron_name(place)} is made of {len(names)} tensors "
                f"({', '.join(names)}), not of {len(tensors)}"
            )
        for name, tensor, shape in zip(names, tensors, self.hf_shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise ConversionError(_misshapen(name, tensor, shape))
            if tensor.dtype != tensors[0].dtype:
                raise ConversionError(
                    f"{name} is {tensor.dtype} and {names[0]} is {tensors[0].dtype}, but "
                    f"{self.megatron_name(place)} holds both and has one dtype"
                )
        return self.join(tensors)

    def split(self, full: Tensor, place: Place) -> tuple[Tensor, ...]:
        """Cut a whole Megatron parameter into Hugging Face tensors (order of `hf`).

        Raises:
            ConversionError: `full` has another shape than in the config.
        """
        if tuple(full.shape) != self.full_shape:
            raise ConversionError(_misshapen(self.megatron_name(place), full, self.full_shape))
        return self.part(full)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The shard of a whole parameter on tensor parallel rank `rank` of `size`."""
        shape = self.shard_shape(size)
        if self.tp_dim is None or size == 1:
            return full
        if self.vocab_padded and (padding := shape[0] * size - full.shape[0]):
            full = concatenate([full, full.new_zeros(padding, *full.shape[1:])])
        if self.glu:
            halves = [half.chunk(size)[rank] for half in full.chunk(2)]
            return concatenate(halves)
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
            full = concatenate([*gates, *ups])
        else:
            full = concatenate(shards, dim=self.tp_dim)
        return full[: self.full_shape[0]] if self.vocab_padded else full


def shard_size(rule: Rule, tp_size: int) -> int:
    """Number of tensor parallel shards of a parameter; experts are not sharded."""
    return tp_size if rule.num_experts is None else 1


def concatenate(tensors: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """`torch.cat`, importing torch only here: names and shapes are used without it."""
    import torch

    return torch.cat(list(tensors), dim=dim)


def find_rule(
    rules: Sequence[Rule], megatron_name: str, *, numbers: Sequence[int] | None = None
) -> tuple[Rule, Place]:
    """Find the rule and the place of a Megatron parameter.

    Accepts the names of our layer spec and of Transformer Engine's.

    Args:
        rules: the model's rules.
        megatron_name: name of the parameter.
        numbers: global numbers of a stage's layers, if the name has the stage's own; the returned
            place has the global one.

    Raises:
        ConversionError: there is no rule for the name, or no such layer or expert.
    """
    for rule in rules:
        if (place := rule.place_in(megatron_name)) is not None:
            if numbers is not None and place.layer is not None:
                place = place._replace(layer=numbers[place.layer])
            if rule.reaches(place):
                return rule, place
    raise ConversionError(f"no rule converts the Megatron parameter {megatron_name}")


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(template)))


def to_megatron(
    rules: Sequence[Rule], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert a stream of Hugging Face tensors to whole Megatron parameters.

    A parameter is yielded as soon as all its tensors have arrived. Held in memory are incomplete
    parameters and, for a tied model, the embedding, to compare it with a stored output layer. Tied
    models also yield `output_layer.weight`, of which the last pipeline stage keeps its own copy.

    Args:
        rules: the architecture's name rules.
        tensors: (Hugging Face name, whole tensor), any order.

    Yields:
        (Megatron name in our layer spec with global numbers, whole tensor).

    Raises:
        ConversionError: a tensor is extra, given twice, misshapen or (at the end) missing; or the
            output layer of a tied model differs from the embedding.
    """
    # Every tensor's parameters: the embedding of a tied model has two.
    homes: dict[str, list[tuple[Rule, Place]]] = {}
    for rule in rules:
        for place in rule.places:
            for name in rule.hf_names(place):
                homes.setdefault(name, []).append((rule, place))
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checked(rules, _without_copies(homes, tensors)):
        for rule, place in homes[name]:
            target = rule.megatron_name(place)
            parts = waiting.setdefault(target, {})
            parts[name] = tensor
            if len(parts) == len(rule.hf):
                del waiting[target]
                yield target, rule.merge([parts[n] for n in rule.hf_names(place)], place)


def _without_copies(
    wanted: Container[str], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Leave out what the other tensors determine; an output layer must be the embedding then."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if _OUTPUT not in wanted and name in (_OUTPUT, _EMBEDDING):
            copies[name] = tensor
            one, *others = copies.values()
            if not all(one.dtype == other.dtype and one.equal(other) for other in others):
                raise ConversionError(
                    f"{_OUTPUT} differs from {_EMBEDDING}, but config.json ties them "
                    "(tie_word_embeddings is true)"
                )
        if name in wanted or not _is_redundant(name):
            yield name, tensor


def split_all(
    rules: Sequence[Rule], parameters: Iterable[tuple[Rule, Place, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert a stream of whole Megatron parameters to Hugging Face tensors, without tied copies.

    Args:
        rules: the architecture's name rules.
        parameters: (rule, place, whole parameter); `find_rule` has the first two of a name.

    Yields:
        (Hugging Face name, whole tensor).

    Raises:
        ConversionError: a parameter is given twice, misshapen or (at the end) missing.
    """
    seen: set[str] = set()
    for rule, place, full in parameters:
        if rule.tied:
            continue
        names = rule.hf_names(place)
        if names[0] in seen:
            raise ConversionError(f"{rule.megatron_name(place)} occurs twice")
        seen.update(names)
        yield from zip(names, rule.split(full, place), strict=True)
    check_names(rules, seen)


def hf_shapes(rules: Sequence[Rule]) -> dict[str, Shape]:
    """Shapes of all Hugging Face tensors of the model, in the order of the rules."""
    return {
        name: shape
        for rule in rules
        if not rule.tied
        for place in rule.places
        for name, shape in zip(rule.hf_names(place), rule.hf_shapes, strict=True)
    }


def checked(
    rules: Sequence[Rule], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Pass Hugging Face tensors through, and check that they are exactly the model's.

    Raises:
        ConversionError: a tensor is extra, given twice, misshapen or (at the end) missing.
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


def check_beginning(names: Iterable[str], embedding: str, *, source: str) -> None:
    """Tell names that begin otherwise than a model's, as of a wrapper that was saved with it.

    `_orig_mod.` is torch.compile's, `base_model.model.` peft's, `module.` data parallelism's,
    `language_model.` that of a model with other parts.

    Args:
        names: names of a folder's tensors, of either format.
        embedding: the name of the model's, which none may have but for its beginning.
        source: the folder, for errors.

    Raises:
        ConversionError: names both beginnings.
    """
    first, _, last = embedding.partition(".")
    found = [name for name in names if f".{name}".endswith(f".{last}")]
    if found and embedding not in found:
        raise ConversionError(
            f"{source}: names of tensors begin with {found[0].removesuffix(last)!r} ({found[0]}), "
            f"not with '{first}.' ({embedding}): save the model without what is wrapped around it, "
            "or rename them"
        )


def check_names(rules: Sequence[Rule], names: Iterable[str]) -> None:
    """Raise ConversionError unless `names` are exactly the model's Hugging Face tensors."""
    given, wanted = set(names), set(hf_shapes(rules))
    if missing := sorted(wanted - given):
        raise ConversionError(f"missing tensors: {some(missing)}")
    if extra := sorted(name for name in given - wanted if not _is_redundant(name)):
        raise ConversionError(
            f"tensors without a place in the model that config.json describes: {some(extra)}"
        )


def _is_redundant(name: str) -> bool:
    """Whether a tensor without a rule is determined by the others; some checkpoints store it."""
    # The output layer has no rule only if it is tied to the embedding.
    return name == _OUTPUT or name.endswith(".rotary_emb.inv_freq")


def _misshapen(name: str, tensor: Tensor, shape: Shape) -> str:
    return f"{name} has shape {list(tensor.shape)}; the model's config says {list(shape)}"


def some(names: Sequence[str]) -> str:
    """The first eight names, and how many more there are."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
