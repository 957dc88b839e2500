"""Keys of a Megatron folder: megatron-core's names of parameters on disk.

A parameter's key depends on the version and options of the program that wrote it:

- all layers stacked under `decoder.layers.mlp.linear_fc2.weight`, or one key for each,
  `decoder.layers.3.mlp.linear_fc2.weight` (`non_homogeneous_layers`, and always in a model whose
  layers differ: `Rule.in_layers`);
- all experts stacked under `mlp.experts.experts.linear_fc2.weight` (behind the layers), or one key
  for each, `mlp.experts.experts.7.linear_fc2.weight`, and then the gated linear in two halves,
  `linear_fc1.weight_w` and `linear_fc1.weight_v` (`singleton_local_shards`);
- a norm under its own name, or as part of the following linear, as in Transformer Engine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gapo_megatron.errors import ConversionError
from gapo_megatron.models.rules import Place, Rule, Shape, check_beginning, some

_LAYERS = "decoder.layers."
_HALVES = ("_w", "_v")
# Keys of norms with megatron-core's local layer spec. It uses them even in front of experts, where
# Transformer Engine's spec keeps the norm's own name.
_LOCAL_SPEC = {
    "decoder.layers.input_layernorm.": "decoder.layers.self_attention.linear_qkv.layer_norm_",
    "decoder.layers.pre_mlp_layernorm.": "decoder.layers.mlp.linear_fc1.layer_norm_",
}


class Slot(NamedTuple):
    """Slot of a parameter, or of half of one, on disk."""

    key: str
    lead: tuple[int, ...]
    """Index into the stacked leading dimensions: layer, expert."""


def is_optimizer(key: str) -> bool:
    """Whether the key names an optimizer's tensor."""
    return re.match(r"(chained_\d+\.)?optimizer\.", key) is not None


def are_numbered(rules: Sequence[Rule]) -> bool:
    """Whether a model's layers differ, so that each has its own keys."""
    return any(rule.in_layers is not None for rule in rules)


def written_slot(rule: Rule, place: Place) -> Slot:
    """The slot at which `write_megatron` stores a parameter.

    The key is megatron-core's default for a model with Transformer Engine's layer spec.
    """
    of_norm = rule.te_name if rule.num_experts is None else None
    key = _stacked(of_norm or rule.megatron)
    if rule.in_layers is None:
        return Slot(key, tuple(number for number in place if number is not None))
    numbered = key.replace(_LAYERS, f"{_LAYERS}{place.layer}.")
    return Slot(numbered, () if place.expert is None else (place.expert,))


def written_shape(rule: Rule) -> Shape:
    """Shape of all parameters of a rule under one key."""
    num_layers = rule.num_layers if rule.in_layers is None else None
    stack = tuple(size for size in (num_layers, rule.num_experts) if size is not None)
    return (*stack, *rule.full_shape)


def find_spelling(rules: Sequence[Rule], key: str, keys: Collection[str]) -> str:
    """The key itself or, if the folder lacks it, the folder's key of the same norm.

    Args:
        rules: the model's rules.
        key: requested by a model.
        keys: the folder's keys.
    """
    if key in keys:
        return key
    stacked, layer = _take_number(key, _LAYERS)
    for rule in rules:
        spellings = _spellings(rule)
        if stacked in spellings:
            numbered = _LAYERS if layer is None else f"{_LAYERS}{layer}."
            others = (numbered + name.removeprefix(_LAYERS) for name in spellings)
            return next((name for name in others if name in keys), key)
    return key


def extra_states(rules: Sequence[Rule]) -> list[str]:
    """Keys of Transformer Engine's extra state, which is empty without fp8.

    A model with its layer spec fails to load a checkpoint that lacks one of them. Which modules
    have one depends on the version; these are the modules of all versions.
    """
    stacks: dict[str, Shape] = {}
    for rule, place in ((one, at) for one in rules for at in one.places):
        module = written_slot(rule, place).key.rpartition(".")[0]
        if re.search(r"(linear_\w+|layernorm)$", module):
            stacks[module] = written_shape(rule)[: -len(rule.full_shape)] or (1,)
        if module.endswith(".self_attention.linear_proj"):
            stacks[module.replace("linear_proj", "core_attention")] = stacks[module]
    return [
        f"{module}._extra_state/shard_{_dotted(numbers)}_{_dotted(stack)}"
        for module, stack in stacks.items()
        for numbers in itertools.product(*map(range, stack))
    ]


def find_slots(
    rules: Sequence[Rule], shapes: Mapping[str, Shape], *, source: str
) -> dict[tuple[str, Place], tuple[Slot, ...]]:
    """Match the keys of a folder with a model's parameters.

    Args:
        rules: the model's rules.
        shapes: shape of every tensor on disk that is not an optimizer's.
        source: folder, for errors.

    Returns:
        By (`Rule.megatron`, place): one slot, or two for the halves of a gated linear. Tied copies
        are left out.

    Raises:
        ConversionError: a key belongs to no parameter or has another shape, or a parameter has no
            key or several; see also `rules.check_beginning`.
    """
    check_beginning(shapes, "embedding.word_embeddings.weight", source=source)
    spellings: dict[str, list[Rule]] = {}
    for rule in rules:
        for key in () if rule.tied else _spellings(rule):
            spellings.setdefault(key, []).append(rule)
    # Every key belongs to a parameter, and no parameter has two (but the halves of a gated linear).
    found: dict[tuple[str, Place], dict[str, Slot]] = {}
    extra = []
    for key, shape in shapes.items():
        slots = _slots_of(key, shape, spellings, source)
        if not slots:
            extra.append(key)
        for name, place, half, slot in slots:
            at = found.setdefault((name, place), {})
            if half in at or (at and "" in (half, *at)):
                raise ConversionError(
                    f"{source}: {key} and {next(iter(at.values())).key} hold the same parameter"
                )
            at[half] = slot
    if extra:
        raise ConversionError(
            f"{source}: keys of no parameter in the model that config.json describes: {some(extra)}"
        )
    # Every parameter has a key, or one for each half.
    missing = [
        rule.megatron_name(place)
        for rule in rules
        if not rule.tied
        for place in rule.places
        if found.get((rule.megatron, place), {}).keys() not in ({""}, set(_HALVES))
    ]
    if missing:
        raise ConversionError(f"{source}: no key holds {some(missing)}")
    return {
        where: tuple(at[half] for half in ("", *_HALVES) if half in at)
        for where, at in found.items()
    }


def _slots_of(
    key: str, shape: Shape, spellings: Mapping[str, Sequence[Rule]], source: str
) -> list[tuple[str, Place, str, Slot]]:
    """All parameters that a key holds: (`Rule.megatron`, place, half, slot)."""
    stacked, layer = _take_number(key, _LAYERS)
    stacked, expert = _take_number(stacked, "mlp.experts.experts.")
    half = next((half for half in _HALVES if stacked.endswith(half)), "")
    found = spellings.get(stacked.removesuffix(half), ())
    rule = next((one for one in found if one.in_layers is None or layer in one.in_layers), None)
    if rule is None or (half and not rule.glu):
        return []
    is_stack = (
        rule.num_layers is not None and layer is None,
        rule.num_experts is not None and expert is None,
    )
    limits = (rule.num_layers, rule.num_experts)
    stack = tuple(size for size, here in zip(limits, is_stack, strict=True) if here)
    expected = (*stack, *(rule.half_shape if half else rule.full_shape))
    # Padding follows the rows of the vocabulary.
    is_padded = rule.vocab_padded and shape[:1] > expected[:1] and shape[1:] == expected[1:]
    if shape != expected and not is_padded:
        raise ConversionError(
            f"{source}: {key} has shape {list(shape)}; the model's config says {list(expected)}"
        )
    # Only the places with the key's layer and expert: trying all, for 12,000 keys, takes minutes.
    numbers = [
        range(limit or 1) if given is None else range(given, min(given + 1, limit or 0))
        for given, limit in zip((layer, expert), limits, strict=True)
    ]
    slots = []
    for at in itertools.product(*numbers):
        pairs = zip(at, limits, strict=True)
        place = Place(*(n if limit is not None else None for n, limit in pairs))
        lead = tuple(n for n, here in zip(at, is_stack, strict=True) if here)
        slots.append((rule.megatron, place, half, Slot(key, lead)))
    return slots


def _spellings(rule: Rule) -> set[str]:
    """Possible keys of a rule's parameters on disk, with layers and experts stacked."""
    names = {_stacked(name) for name in (rule.megatron, rule.te_name) if name}
    names |= {
        new + name.removeprefix(old)
        for old, new in _LOCAL_SPEC.items()
        for name in names
        if name.startswith(old)
    }
    return names


def _stacked(template: str) -> str:
    return template.replace("layers.{layer}.", "layers.").replace(
        "experts.local_experts.{expert}.", "experts.experts."
    )


def _take_number(key: str, behind: str) -> tuple[str, int | None]:
    """The key without the number that follows `behind`, and that number."""
    found = re.search(rf"(?<={re.escape(behind)})(\d+)\.", key)
    return (key[: found.start()] + key[found.end() :], int(found[1])) if found else (key, None)


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
