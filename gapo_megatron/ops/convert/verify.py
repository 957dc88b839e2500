"""The gate of a conversion: both folders hold the same model, tensor by tensor, bit for bit.

What is compared lies on disk and goes through the table that converted it: a tensor that was lost,
changed or put elsewhere is seen; a table that is wrong in both directions is not. Logits see that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gapo_megatron.errors import ConversionError
from gapo_megatron.hf.torch_dist import MegatronFolder
from gapo_megatron.hf.weights import Entry, HfFolder, finite_extremes
from gapo_megatron.models.rules import Place, Rule, check_names, hf_shapes

Side = Literal["hf", "megatron"]
Mode = Literal["none", "sample", "full"]

_PARTS = {
    "norms": r"norm",
    "embedding": r"\bembedding",
    "attention": r"\bself_attention\.",
    "experts": r"\bmlp\.(experts|router)\.",
    "mlp": r"\bmlp\.",
    "output": r"\boutput_layer\.",
}
"""Parts of a model by their Megatron names; the first that matches."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Tensors:
    """Some tensors of one folder, as its headers describe them."""

    number: int
    num_bytes: int
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Tensors:
        dtypes = {str(entry.dtype).removeprefix("torch.") for entry in entries}
        num_bytes = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
        return cls(len(entries), num_bytes, tuple(sorted(dtypes)))


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the model on both sides."""

    name: str
    num_parameters: int
    """Parameters as a model holds them; a Megatron folder stacks all layers' under one key."""
    hf: Tensors
    megatron: Tensors


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of the gate; that there is a report means that nothing was wrong."""

    parts: list[Part]
    num_parameters: int
    num_elements: int
    num_compared: int
    """Parameters that were read back from both folders."""


def check_tensors(hf: HfFolder, rules: Sequence[Rule]) -> list[str]:
    """Every tensor of a Hugging Face folder has one place in the model, and none is missing.

    Reads headers; of a tied model that stores its output layer too, also that and the embedding.

    Returns:
        Names that the conversion leaves out because the config determines them.

    Raises:
        ConversionError: a tensor is missing, extra or misshapen, or a second copy is not a copy;
            names tensor and file.
    """
    shapes = hf_shapes(rules)
    try:
        check_names(rules, hf.entries)
    except ConversionError as error:
        extra = sorted({entry.file for name, entry in hf.entries.items() if name not in shapes})
        where = f" ({', '.join(extra[:4])})" if extra and "missing" not in str(error) else ""
        raise ConversionError(f"model folder {hf.root}{where}: {error}") from None
    for name, shape in shapes.items():
        if (entry := hf.entries[name]).shape != shape:
            raise ConversionError(
                f"{hf.root / entry.file}: {name} has shape {list(entry.shape)}; "
                f"the model's config says {list(shape)}"
            )
    left_out = [name for name in hf.entries if name not in shapes]
    if "lm_head.weight" in left_out:
        _check_copy(hf, "lm_head.weight", "model.embed_tokens.weight")
    return left_out


def kept_dtypes(source: HfFolder | MegatronFolder, rules: Sequence[Rule]) -> dict[str, torch.dtype]:
    """Dtype of all of a rule's parameters (by `Rule.megatron`) when none is changed.

    Raises:
        ConversionError: they differ, and Megatron stores them in one tensor.
    """
    dtypes: dict[str, torch.dtype] = {}
    for rule in rules:
        if rule.tied:
            continue
        if isinstance(source, HfFolder):
            names = [name for place in rule.places for name in rule.hf_names(place)]
        else:
            names = [home.key for at in rule.places for home in source.homes[rule.megatron, at]]
        first = dtypes[rule.megatron] = source.entries[names[0]].dtype
        for name in names:
            entry = source.entries[name]
            if entry.dtype != first:
                raise ConversionError(
                    f"{source.root / entry.file}: {name} is {entry.dtype} but {names[0]} is "
                    f"{first}; Megatron stores both in one tensor: choose a --dtype"
                )
    return dtypes


def cast(tensor: Tensor, dtype: torch.dtype | None, *, name: str) -> Tensor:
    """Change the dtype, unless `dtype` is None.

    Raises:
        ConversionError: a number is not finite, or would not be in `dtype`.
    """
    for extreme in finite_extremes(tensor, name=name):
        if dtype and not extreme.to(dtype).isfinite():
            raise ConversionError(
                f"{name} holds {extreme.item():.6g}, more than {dtype} can: choose another --dtype"
            )
    return tensor if dtype is None else tensor.to(dtype)


def num_bytes_to_read(
    hf: HfFolder, megatron: MegatronFolder, rules: Sequence[Rule], mode: Mode
) -> int:
    """Bytes of the Hugging Face folder that `verify` reads; `on_bytes` adds up to them."""
    return sum(_num_bytes(hf, *chosen) for chosen in _choose(hf, megatron, rules, mode))


def verify(
    hf: HfFolder,
    megatron: MegatronFolder,
    rules: Sequence[Rule],
    *,
    written: Side,
    dtype: torch.dtype | None,
    mode: Mode,
    num_threads: int = 4,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Report:
    """Account for every tensor of both folders, and read parameters back, bit for bit.

    Each chosen parameter is made of the Hugging Face tensors again and compared with the Megatron
    folder's, and cut into Hugging Face tensors and compared with those.

    Args:
        hf: one side.
        megatron: the other side.
        rules: the model's name rules.
        written: the side that was made of the other.
        dtype: dtype that it was cast to; None if it was not.
        mode: "full" reads everything back, "none" nothing. A "sample" has every rule in the first,
            the middle and the last layer (of their experts the first and the last), and a tensor
            of every file of either side.
        num_threads: parameters compared at a time; each is in memory four times.
        on_bytes: called with every parameter's bytes on the Hugging Face side.

    Raises:
        ConversionError: the sides differ; names tensors and files, and says where.
    """
    check_tensors(hf, rules)
    parts = account(hf.entries, megatron.entries, rules)
    chosen = _choose(hf, megatron, rules, mode)

    def compare(one: tuple[Rule, Place]) -> None:
        _compare(hf, megatron, *one, written=written, dtype=dtype)
        on_bytes(_num_bytes(hf, *one))

    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(compare, chosen):  # the first failure ends it
            pass
    return Report(
        parts=parts,
        num_parameters=sum(part.num_parameters for part in parts),
        num_elements=sum(math.prod(shape) for shape in hf_shapes(rules).values()),
        num_compared=len(chosen),
    )


def account(
    hf_entries: Mapping[str, Entry], megatron_entries: Mapping[str, Entry], rules: Sequence[Rule]
) -> list[Part]:
    """Contents of every part of the model on both sides.

    Raises:
        ConversionError: a part has not the same number of elements on both sides (vocabulary
            padding of the Megatron side left out).
    """
    rows = {
        rule.megatron: rule.full_shape[0] for rule in rules if rule.vocab_padded and not rule.tied
    }
    mine: dict[str, list[Entry]] = {name: [] for name in _PARTS}
    theirs: dict[str, list[Entry]] = {name: [] for name in _PARTS}
    number = dict.fromkeys(_PARTS, 0)
    for rule in rules:
        if rule.tied:
            continue
        part = part_of(rule.megatron)
        number[part] += len(rule.places)
        names = [name for place in rule.places for name in rule.hf_names(place)]
        mine[part] += [hf_entries[name] for name in names]
    padding = dict.fromkeys(_PARTS, 0)
    for key, entry in megatron_entries.items():
        part = part_of(key)
        theirs[part].append(entry)
        if key in rows:
            padding[part] += (entry.shape[0] - rows[key]) * math.prod(entry.shape[1:])
    for part in _PARTS:
        here = sum(math.prod(entry.shape) for entry in mine[part])
        there = sum(math.prod(entry.shape) for entry in theirs[part]) - padding[part]
        if here != there:
            raise ConversionError(
                f"{part}: {here:,} elements in the Hugging Face folder, {there:,} in the Megatron "
                "folder"
            )
    return [
        Part(part, number[part], Tensors.of(mine[part]), Tensors.of(theirs[part]))
        for part in ("embedding", "attention", "mlp", "experts", "norms", "output")
        if number[part]
    ]


def part_of(name: str) -> str:
    """The part of the model that a Megatron parameter or key belongs to."""
    for part, pattern in _PARTS.items():
        if re.search(pattern, name):
            return part
    raise ConversionError(f"{name} belongs to no part of a model")


def _choose(
    hf: HfFolder, megatron: MegatronFolder, rules: Sequence[Rule], mode: Mode
) -> list[tuple[Rule, Place]]:
    """The parameters that are read back."""
    if mode == "none":
        return []
    everything = [(rule, at) for rule in rules if not rule.tied for at in rule.places]
    if mode == "full":
        return everything

    def files(rule: Rule, place: Place) -> set[str]:
        """Files of both sides; no name belongs to both formats."""
        names = rule.hf_names(place)
        return {hf.entries[name].file for name in names} | megatron.files(rule, place)

    chosen = [one for one in everything if _is_sampled(*one)]
    seen = {file for one in chosen for file in files(*one)}
    for one in everything:
        if not files(*one) <= seen:
            chosen.append(one)
            seen |= files(*one)
    return chosen


def _is_sampled(rule: Rule, place: Place) -> bool:
    layers, experts = rule.num_layers or 1, rule.num_experts or 1
    is_layer = (place.layer or 0) in (0, layers // 2, layers - 1)
    return is_layer and (place.expert or 0) in (0, experts - 1)


def _compare(
    hf: HfFolder,
    megatron: MegatronFolder,
    rule: Rule,
    place: Place,
    *,
    written: Side,
    dtype: torch.dtype | None,
) -> None:
    """Raise ConversionError unless both sides hold the same bits of one parameter."""
    names, parameter = rule.hf_names(place), rule.megatron_name(place)
    tensors, full = [hf.read(name) for name in names], megatron.read(rule, place)
    there = f"{parameter} in {megatron.root}"
    here = [f"{name} in {hf.root / hf.entries[name].file}" for name in names]
    made, source = [(there, full)], tensors
    if written == "hf":
        made, source = list(zip(here, tensors, strict=True)), [full]
    expected = dtype or source[0].dtype
    for where, tensor in made:
        if tensor.dtype != expected:
            raise ConversionError(f"{where} is {tensor.dtype}; it should be {expected}")
    tensors, full = [tensor.to(expected) for tensor in tensors], full.to(expected)
    for where, mine, theirs in zip(here, tensors, rule.split(full, place), strict=True):
        if difference := _difference(mine, theirs):
            raise ConversionError(f"{where} differs from {there}: {difference}")
    if difference := _difference(rule.merge(tensors, place), full):
        raise ConversionError(f"{there} is not made of {', '.join(names)}: {difference}")


def _check_copy(hf: HfFolder, name: str, original: str) -> None:
    """A tied model may store its output layer too, provided it is the embedding."""
    if difference := _difference(hf.read(name), hf.read(original)):
        file = hf.root / hf.entries[name].file
        raise ConversionError(
            f"{file}: {name} is not {original} ({difference}), though config.json says "
            "tie_word_embeddings: true; converting would lose it"
        )


def _difference(mine: Tensor, theirs: Tensor) -> str:
    """How two tensors of one dtype differ, bit for bit; empty if they do not."""
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"{list(mine.shape)} {mine.dtype} against {list(theirs.shape)} {theirs.dtype}"
    integer = _INTEGERS[mine.dtype.itemsize]
    bits = [tensor.contiguous().view(integer) for tensor in (mine, theirs)]
    if torch.equal(*bits):
        return ""
    places = (bits[0] != bits[1]).nonzero()
    first = tuple(places[0].tolist())
    return (
        f"{len(places)} of {mine.numel()} elements, the first at {list(first)}: "
        f"{mine[first].item():.9g} against {theirs[first].item():.9g}"
    )


def _num_bytes(hf: HfFolder, rule: Rule, place: Place) -> int:
    return Tensors.of([hf.entries[name] for name in rule.hf_names(place)]).num_bytes
