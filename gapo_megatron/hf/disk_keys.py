"""Keys of a Megatron folder: how megatron-core names on disk what a model calls otherwise.

One parameter has several spellings, by the version and the options of who wrote it:

- all layers stacked under `decoder.layers.mlp.linear_fc2.weight`, or one key for each,
  `decoder.layers.3.mlp.linear_fc2.weight` (`non_homogeneous_layers`);
- all experts stacked under `mlp.experts.experts.linear_fc2.weight` (behind the layers), or one key
  for each, `mlp.experts.experts.7.linear_fc2.weight`, and then the gated linear in two halves,
  `linear_fc1.weight_w` and `linear_fc1.weight_v` (`singleton_local_shards`);
- a norm under its own name, or inside the linear behind it, where Transformer Engine has it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gapo_megatron.errors import ConversionError
from gapo_megatron.models.rules import Place, Rule, Shape

_LAYERS = "decoder.layers."
_HALVES = ("_w", "_v")
# What megatron-core's local layer spec saves norms as. It does so even where the next module is a
# layer of experts, whose norm Transformer Engine's spec leaves under its own name.
_LOCAL_SPEC = {
    "decoder.layers.input_layernorm.": "decoder.layers.self_attention.linear_qkv.layer_norm_",
    "decoder.layers.pre_mlp_layernorm.": "decoder.layers.mlp.linear_fc1.layer_norm_",
}


class Home(NamedTuple):
    """Where a parameter, or half of one, lies."""

    key: str
    lead: tuple[int, ...]
    """Into the leading dimensions of what is stacked: layer, expert."""


def is_optimizer(key: str) -> bool:
    """The key is of an optimizer's tensor, not of a weight."""
    return re.match(r"(chained_\d+\.)?optimizer\.", key) is not None


def written_key(rule: Rule) -> str:
    """The key that `write_megatron` stores all of a rule's parameters under.

    It is what megatron-core has by default for a model with Transformer Engine's layer spec.
    """
    of_norm = rule.te_name if rule.num_experts is None else None
    return _stacked(of_norm or rule.megatron)


def written_home(rule: Rule, place: Place) -> Home:
    """Where `write_megatron` puts a parameter."""
    return Home(written_key(rule), tuple(number for number in place if number is not None))


def written_shape(rule: Rule) -> Shape:
    """Shape of all of a rule's parameters, stacked."""
    stack = tuple(size for size in (rule.num_layers, rule.num_experts) if size is not None)
    return (*stack, *rule.full_shape)


def find_spelling(rules: Sequence[Rule], key: str, keys: Collection[str]) -> str:
    """The key itself, or, where the folder has none such, what it calls the same norm.

    Args:
        rules: of the model.
        key: that a model asks for.
        keys: of the folder.
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
    """Keys of what Transformer Engine keeps beside its weights: for fp8, and else nothing.

    A model with its layer spec asks a checkpoint for them, and fails where one is not there. Which
    modules have one depends on its version: these are all that ever had.
    """
    stacks: dict[str, Shape] = {}
    for rule in rules:
        module = written_key(rule).rpartition(".")[0]
        if re.search(r"(linear_\w+|layernorm)$", module):
            stacks[module] = written_shape(rule)[: -len(rule.full_shape)] or (1,)
        if module.endswith(".linear_qkv"):
            stacks[module.replace("linear_qkv", "core_attention")] = stacks[module]
    return [
        f"{module}._extra_state/shard_{_dotted(numbers)}_{_dotted(stack)}"
        for module, stack in stacks.items()
        for numbers in itertools.product(*map(range, stack))
    ]


def find_homes(
    rules: Sequence[Rule], shapes: Mapping[str, Shape], *, source: str
) -> dict[tuple[str, Place], tuple[Home, ...]]:
    """Match the keys of a folder with a model's parameters.

    Args:
        rules: of the model.
        shapes: of every tensor on disk that is not an optimizer's.
        source: folder, for errors.

    Returns:
        By (`Rule.megatron`, place): one home, or two of a gated linear's halves. Tied copies are
        not there.

    Raises:
        ConversionError: a key that is no parameter's, or misshapen; a parameter that no key or more
            than one holds.
    """
    spellings = {key: rule for rule in rules if not rule.tied for key in _spellings(rule)}
    found: dict[tuple[str, Place], dict[str, Home]] = {}
    extra = []
    for key, shape in shapes.items():
        homes = _homes_of(key, shape, spellings, source)
        if not homes:
            extra.append(key)
        for name, place, half, home in homes:
            at = found.setdefault((name, place), {})
            if half in at or (at and "" in (half, *at)):
                raise ConversionError(f"{source}: {key} and {next(iter(at.values())).key} are one")
            at[half] = home
    if extra:
        raise ConversionError(
            f"{source}: keys without a place in the model that config.json describes: "
            f"{_some(extra)}"
        )
    missing = [
        rule.megatron_name(place)
        for rule in rules
        if not rule.tied
        for place in rule.places
        if found.get((rule.megatron, place), {}).keys() not in ({""}, set(_HALVES))
    ]
    if missing:
        raise ConversionError(f"{source}: no key holds {_some(missing)}")
    return {
        where: tuple(at[half] for half in ("", *_HALVES) if half in at)
        for where, at in found.items()
    }


def _homes_of(
    key: str, shape: Shape, spellings: Mapping[str, Rule], source: str
) -> list[tuple[str, Place, str, Home]]:
    """All that a key holds: (`Rule.megatron`, place, half, home)."""
    stacked, layer = _take_number(key, _LAYERS)
    stacked, expert = _take_number(stacked, "mlp.experts.experts.")
    half = next((half for half in _HALVES if stacked.endswith(half)), "")
    rule = spellings.get(stacked.removesuffix(half))
    if rule is None or (half and not rule.glu):
        return []
    is_stack = (
        rule.num_layers is not None and layer is None,
        rule.num_experts is not None and expert is None,
    )
    limits = (rule.num_layers, rule.num_experts)
    stack = tuple(size for size, here in zip(limits, is_stack, strict=True) if here)
    expected = (*stack, *(rule.hf_shapes[_HALVES.index(half)] if half else rule.full_shape))
    # Padding follows the vocabulary's own rows.
    is_padded = rule.vocab_padded and shape[:1] > expected[:1] and shape[1:] == expected[1:]
    if shape != expected and not is_padded:
        raise ConversionError(
            f"{source}: {key} has shape {list(shape)}; the model's config says {list(expected)}"
        )
    # The places that the key's numbers leave: to go through all, for each of 12,000 keys, takes
    # minutes.
    numbers = [
        range(limit or 1) if given is None else range(given, min(given + 1, limit or 0))
        for given, limit in zip((layer, expert), limits, strict=True)
    ]
    homes = []
    for at in itertools.product(*numbers):
        pairs = zip(at, limits, strict=True)
        place = Place(*(n if limit is not None else None for n, limit in pairs))
        lead = tuple(n for n, here in zip(at, is_stack, strict=True) if here)
        homes.append((rule.megatron, place, half, Home(key, lead)))
    return homes


def _spellings(rule: Rule) -> set[str]:
    """Keys of a rule's parameters on disk, as if layers and experts were stacked."""
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
    """The key without the number behind `behind`, and the number."""
    found = re.search(rf"(?<={re.escape(behind)})(\d+)\.", key)
    return (key[: found.start()] + key[found.end() :], int(found[1])) if found else (key, None)


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
