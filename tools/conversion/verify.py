"""Verify a conversion: both folders hold the same model, tensor by tensor, bit for bit.

The comparison reads both folders from disk and uses the table that converted them. It finds tensors
that were lost, changed or misplaced, but not a table that is wrong in both directions; the check of
logits does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats.torch_dist import MegatronFolder
from gapo_megatron.formats.weights import HfFolder, finite_extremes
from gapo_megatron.models.rules import Place, Rule, check_names, hf_shapes

Side = Literal["hf", "megatron"]
Mode = Literal["none", "sample", "full"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_tensors(hf: HfFolder, rules: Sequence[Rule]) -> list[str]:
    """Check that a Hugging Face folder has exactly the tensors of the model.

    Reads headers only; if a tied model stores its output layer too, also that and the embedding.

    Returns:
        Names that the conversion leaves out, because the config determines these tensors.

    Raises:
        ConversionError: a tensor is missing, extra or misshapen, or the output layer of a tied
            model differs from the embedding; names tensor and file.
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
    """Dtype of each rule's parameters, by `Rule.megatron`, if nothing is cast.

    Raises:
        ConversionError: parameters that Megatron stores in one tensor have different dtypes.
    """
    dtypes: dict[str, torch.dtype] = {}
    for rule in rules:
        if rule.tied:
            continue
        if isinstance(source, HfFolder):
            names = [name for place in rule.places for name in rule.hf_names(place)]
        else:
            names = [slot.key for at in rule.places for slot in source.slots[rule.megatron, at]]
        first = dtypes[rule.megatron] = source.entries[names[0]].dtype
        for name in names:
            entry = source.entries[name]
            if entry.dtype != first:
                raise ConversionError(
                    f"{source.root / entry.file}: {name} is {entry.dtype} but {names[0]} is "
                    f"{first}; Megatron stores both in one tensor: set --dtype"
                )
    return dtypes


def wanted_dtype(rule: Rule, dtype: torch.dtype | None) -> torch.dtype | None:
    """What a parameter is cast to if all weights are cast to `dtype`; None: it is not cast."""
    return torch.float32 if dtype is not None and rule.is_buffer else dtype


def cast(tensor: Tensor, dtype: torch.dtype | None, *, name: str) -> Tensor:
    """Change the dtype, unless `dtype` is None.

    Raises:
        ConversionError: a number is not finite, or overflows in `dtype`.
    """
    for extreme in finite_extremes(tensor, name=name):
        if dtype and not extreme.to(dtype).isfinite():
            raise ConversionError(
                f"{name} holds {extreme.item():.6g}, which overflows {dtype}: set another --dtype"
            )
    return tensor if dtype is None else tensor.to(dtype)


def num_bytes_to_read(
    hf: HfFolder, megatron: MegatronFolder, rules: Sequence[Rule], mode: Mode
) -> int:
    """Bytes of the Hugging Face folder that `verify` reads: the sum of its `on_bytes` calls."""
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
) -> int:
    """Check that the Hugging Face folder has every tensor, and compare parameters bit for bit.

    That the Megatron folder has every parameter, `MegatronFolder` has checked.

    Each chosen parameter is merged from the Hugging Face tensors and compared with the Megatron
    folder's, and that is split and compared with the Hugging Face tensors.

    Args:
        hf: Hugging Face folder.
        megatron: Megatron folder.
        rules: the model's name rules.
        written: the side that was converted from the other.
        dtype: dtype it was cast to; None if it was not.
        mode: "full" compares everything, "none" nothing. "sample" compares every rule in the first,
            middle and last layer (the first and last of their experts), and at least one tensor of
            every file on either side.
        num_threads: parameters compared at a time; each is in memory four times.
        on_bytes: called with every parameter's bytes on the Hugging Face side.

    Returns:
        Number of parameters that were compared.

    Raises:
        ConversionError: the sides differ; names tensors, files and the first difference.
    """
    check_tensors(hf, rules)
    chosen = _choose(hf, megatron, rules, mode)

    def compare(one: tuple[Rule, Place]) -> None:
        _compare(hf, megatron, *one, written=written, dtype=dtype)
        on_bytes(_num_bytes(hf, *one))

    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(compare, chosen):  # the first failure ends it
            pass
    return len(chosen)


def _choose(
    hf: HfFolder, megatron: MegatronFolder, rules: Sequence[Rule], mode: Mode
) -> list[tuple[Rule, Place]]:
    """The parameters to compare."""
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
    layers, experts = rule.layers, rule.num_experts or 1
    is_layer = not layers or place.layer in (layers[0], layers[len(layers) // 2], layers[-1])
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
    """Raise ConversionError unless one parameter has the same bits on both sides."""
    names, parameter = rule.hf_names(place), rule.megatron_name(place)
    tensors, full = [hf.read(name) for name in names], megatron.read(rule, place)
    there = f"{parameter} in {megatron.root}"
    here = [f"{name} in {hf.root / hf.entries[name].file}" for name in names]
    made, source = [(there, full)], tensors
    if written == "hf":
        made, source = list(zip(here, tensors, strict=True)), [full]
    expected = wanted_dtype(rule, dtype) or source[0].dtype
    for where, tensor in made:
        if tensor.dtype != expected:
            raise ConversionError(f"{where} is {tensor.dtype}; it should be {expected}")
    tensors, full = [tensor.to(expected) for tensor in tensors], full.to(expected)
    for where, mine, theirs in zip(here, tensors, rule.split(full, place), strict=True):
        if difference := _difference(mine, theirs):
            raise ConversionError(f"{where} differs from {there}: {difference}")
    if difference := _difference(rule.merge(tensors, place), full):
        raise ConversionError(f"{there} differs from {', '.join(names)}: {difference}")


def _check_copy(hf: HfFolder, name: str, original: str) -> None:
    """Check that the output layer which a tied model stores equals the embedding."""
    if difference := _difference(hf.read(name), hf.read(original)):
        file = hf.root / hf.entries[name].file
        raise ConversionError(
            f"{file}: {name} differs from {original} ({difference}), but config.json has "
            "tie_word_embeddings: true; converting would lose it"
        )


def _difference(mine: Tensor, theirs: Tensor) -> str:
    """The first difference between the bits of two tensors; empty if they are equal."""
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
    entries = [hf.entries[name] for name in rule.hf_names(place)]
    return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
