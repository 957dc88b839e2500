"""Read and write Hugging Face model folders: tensor by tensor, complete or not at all."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats import shard
from gapo_megatron.formats.folder import is_marked, mark, new_folder
from gapo_megatron.formats.headers import INDEX, SINGLE
from gapo_megatron.formats.model_folder import add_end_tokens, non_weight_files
from gapo_megatron.formats.model_tensors import model_tensors
from gapo_megatron.formats.stacks import experts_of, slice_of
from gapo_megatron.formats.workers import Read, worker_pool
from gapo_megatron.io.documents import read_object
from gapo_megatron.models.config_json import read_facts
from gapo_megatron.models.rules import Place, Rule, Shape, checked, hf_shapes
from gapo_megatron.models.tables import left_out_field, rules_for

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 2**30


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a folder, from its headers."""

    shape: Shape
    dtype: torch.dtype
    file: str
    """Its file's name in the folder; that of the first chunk if it has several."""


class HfFolder:
    """A Hugging Face model folder, open for reading.

    Attributes:
        root: the folder.
        entries: every tensor of the model by name, in the order of the folder; one per expert,
            also where the folder stacks them (`stacks`); quantized weights as they are read
            (`quantized`).
        left_out: names of the others, see `Architecture.left_out`.
    """

    def __init__(self, hf_dir: str | Path) -> None:
        """Check that the folder is complete; reads headers only.

        Raises:
            ConfigError, ConversionError: see `model_tensors`.
        """
        self.root = Path(hf_dir)
        self._headers, self.left_out = model_tensors(self.root)
        self.entries = {
            name: Entry(header.shape, getattr(torch, header.dtype), header.file)
            for name, header in self._headers.items()
        }

    def read(self, name: str) -> Tensor:
        """Read one whole tensor to the CPU, in the dtype of `entries`; it owns its memory.

        Thread-safe.

        Raises:
            ConversionError: see `shard.read_tensor`; names file and tensor.
        """
        path = self.root / self.entries[name].file
        return shard.read_tensor(path, name, self._headers[name])


def read_hf(hf_dir: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Read all weights of a model folder, one at a time.

    Yields:
        (Hugging Face name, whole tensor on the CPU in the dtype of `HfFolder.entries`).

    Raises:
        ConfigError, ConversionError: see `HfFolder`; raised by the call itself, before the first
            tensor. While iterating: a weight is not finite; names tensor and file.
    """
    folder = HfFolder(hf_dir)
    if folder.left_out:
        logger.warning("%s: %s", hf_dir, describe_left_out(folder))

    def read(name: str) -> Tensor:
        tensor = folder.read(name)
        finite_extremes(tensor, name=f"{folder.root / folder.entries[name].file}: {name}")
        return tensor

    return ((name, read(name)) for name in folder.entries)


def describe_left_out(folder: HfFolder) -> str:
    """What of a model folder is no part of the model."""
    return (
        f"{len(folder.left_out)} tensors of layers that predict further tokens are left out "
        f"({folder.left_out[0]} ...): transformers ignores them, and they are not trained"
    )


def finite_extremes(tensor: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element of a weight.

    Raises:
        ConversionError: `name` is not finite.
    """
    # Both are NaN if any element is; far faster than `isfinite` on every element.
    least, largest = torch.aminmax(tensor)
    for extreme in (least, largest):
        if not extreme.isfinite():
            raise ConversionError(f"{name} holds {extreme.item()}: the weights are damaged")
    return least, largest


def write_hf(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source_dir: str | Path,
    output_dir: str | Path,
    made_by: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    end_tokens: Collection[int] = (),
    write: bool = True,
) -> None:
    """Write a model folder that transformers and vLLM load.

    `output_dir` is complete or absent, see `new_folder`. The tensors of one file are in memory.

    Args:
        tensors: (Hugging Face name, whole tensor) in any order, on any device. Consumed to the end
            even if `write` is False, because producing it may be collective.
        source_dir: folder whose config.json defines the tensors, and whose other files (config,
            tokenizer, generation config) are copied. The copied config.json states the dtype of
            the tensors, if all have the same.
        output_dir: folder to make, or an earlier result of the same command to replace.
        made_by: name of the command.
        max_shard_bytes: largest file, unless a single tensor or all stacked experts of a layer are
            larger; of these, one expert comes after the other.
        end_tokens: see `carry_over`.
        write: False on all ranks but one.

    Raises:
        ConfigError: `source_dir` has no usable config.json, `output_dir` may not be replaced (see
            `check_replaceable`), or there is too little space.
        ConversionError: a tensor is missing, extra, given twice or misshapen (names it), or the
            disk fails.
    """
    source = Path(source_dir)
    rules = rules_for(read_facts(source))
    tensors = checked(rules, tensors)
    if not write:
        for _ in tensors:
            pass
        return
    first = next(tensors)  # to estimate the space by its dtype
    num_bytes = _num_bytes(hf_shapes(rules).values(), first[1].dtype)
    is_ours = is_marked(output_dir, made_by=made_by)
    with new_folder(output_dir, num_bytes=num_bytes, replace=True, is_ours=is_ours) as temporary:
        dtypes = _write_stream(itertools.chain([first], tensors), temporary, max_shard_bytes)
        stored = {dtypes[name] for name in hf_shapes([one for one in rules if not one.is_buffer])}
        dtype = stored.pop() if len(stored) == 1 else None
        carry_over(source, temporary, dtype=dtype, end_tokens=end_tokens)
        mark(temporary, made_by=made_by, made_at=Path(output_dir))


def write_hf_weights(
    read: Read,
    rules: Sequence[Rule],
    *,
    dtypes: Mapping[str, torch.dtype],
    output_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    num_threads: int = 2,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the safetensors files and their index, several files at a time.

    A thread holds one Megatron parameter and the tensors that it is split into.

    Args:
        read: returns a whole Megatron parameter in its dtype; called from several threads, and
            repeatedly for a parameter whose tensors are in several files.
        rules: the model's rules.
        dtypes: dtype of every parameter, by `Rule.megatron`.
        output_dir: an existing folder without weights; see `new_folder`.
        max_shard_bytes: largest file, unless a single tensor or a stack of experts is larger.
        num_threads: number of files written at a time.
        on_bytes: called with the bytes of written tensors, from several threads.

    Raises:
        ConversionError: a parameter has another shape or dtype than in `rules` and `dtypes`, or the
            disk fails; names file and tensor.
    """
    shards = _plan_shards(rules, dtypes, max_shard_bytes)
    names = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]

    def write(file: str, units: list[_Unit]) -> None:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            for unit in units:
                parts = unit.rule.split(read(unit.rule, unit.place), unit.place)
                yield from (
                    (name, part)
                    for name, part in zip(unit.rule.hf_names(unit.place), parts, strict=True)
                    if name in unit.layout
                )
                on_bytes(unit.num_bytes)

        layout = {name: of for unit in units for name, of in unit.layout.items()}
        shard.write_file(output_dir / file, layout, tensors())

    with worker_pool(num_threads, read) as (pool, read):
        futures = [pool.submit(write, *one) for one in zip(names, shards, strict=True)]
        for future in as_completed(futures):  # the first failure ends all
            future.result()
    if len(shards) > 1:
        weight_map = {
            slice_of(name).stack: file
            for file, units in zip(names, shards, strict=True)
            for unit in units
            for name in unit.layout
        }
        _write_index(
            output_dir, weight_map, sum(unit.num_bytes for units in shards for unit in units)
        )


def in_model_order(rules: Sequence[Rule]) -> list[tuple[Rule, Place]]:
    """Every parameter except tied copies, layer by layer, as in most published folders."""
    first = next((n for n, rule in enumerate(rules) if rule.num_layers), len(rules))

    def position(numbered: tuple[int, Rule, Place]) -> float:
        number, _, place = numbered
        if place.layer is not None:
            return place.layer
        return -1 if number < first else float("inf")

    everything = [
        (number, rule, place)
        for number, rule in enumerate(rules)
        if not rule.tied
        for place in rule.places
    ]
    return [(rule, place) for _, rule, place in sorted(everything, key=position)]


def carry_over(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    end_tokens: Collection[int] = (),
) -> None:
    """Copy all files but weights; if a dtype is given, config.json states it.

    A model that has lost layers of `Architecture.left_out` states that it has none. The copied
    config.json states no quantization: weights that were read are written as floats.

    Args:
        source: a model folder.
        target: an existing folder.
        dtype: dtype of all weights; None: as `source` says.
        end_tokens: tokens with which the model has learned to end its responses: see
            `add_end_tokens`.
    """
    for path in non_weight_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    config = read_object(source / "config.json")
    changed = dict(config)
    changed.pop("quantization_config", None)
    if left_out := left_out_field(config):
        changed[left_out] = 0
    if dtype is not None:
        changed.pop("torch_dtype", None)  # its key before transformers 5
        changed["dtype"] = str(dtype).removeprefix("torch.")
    if changed != config:
        text = json.dumps(changed, indent=2, ensure_ascii=False) + "\n"
        (target / "config.json").write_text(text, encoding="utf-8")
    add_end_tokens(target, end_tokens)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tensors of one parameter that are written to one file."""

    rule: Rule
    place: Place
    layout: dict[str, tuple[Shape, torch.dtype]]

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes([shape], dtype) for shape, dtype in self.layout.values())


def _plan_shards(
    rules: Sequence[Rule], dtypes: Mapping[str, torch.dtype], max_bytes: int
) -> list[list[_Unit]]:
    shards: list[list[_Unit]] = [[]]
    room = max_bytes
    for units in _inseparable(rules, dtypes, max_bytes):
        num_bytes = sum(unit.num_bytes for unit in units)
        if shards[-1] and num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].extend(units)
        room -= num_bytes
    return shards


def _inseparable(
    rules: Sequence[Rule], dtypes: Mapping[str, torch.dtype], max_bytes: int
) -> Iterator[list[_Unit]]:
    """What must be in one file: a parameter unless it is too large, all experts of a stack."""
    of_stack: list[_Unit] = []
    for rule, place in in_model_order(rules):
        dtype = dtypes[rule.megatron]
        layout = {
            name: (shape, dtype)
            for name, shape in zip(rule.hf_names(place), rule.hf_shapes, strict=True)
        }
        whole = _Unit(rule, place, layout)
        if slice_of(next(iter(layout))).expert is not None:
            of_stack.append(whole)
            if len(of_stack) == rule.num_experts:
                yield of_stack
                of_stack = []
        elif whole.num_bytes > max_bytes:
            yield from ([_Unit(rule, place, {name: of})] for name, of in layout.items())
        else:
            yield [whole]


def _write_stream(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    max_shard_bytes: int,
) -> dict[str, torch.dtype]:
    """Write tensors as they arrive; the number of files is only known at the end.

    Returns:
        The dtype of each.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    group = None
    pending_bytes = total_bytes = 0

    def flush() -> None:
        shards.append(list(pending))
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pending.items()}
        shard.write_file(folder / f"{len(shards)}.part", layout, pending.items())
        pending.clear()

    for name, tensor in tensors:
        # Copy: the source may reuse its memory for the next tensor.
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        # The experts of a layer come one after another, and are in one file if they are stacked.
        before, group = group, experts_of(name)
        is_whole = group is None or group != before
        if pending and is_whole and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        dtypes[name] = tensor.dtype
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = _shard_name(number, len(shards))
        (folder / f"{number}.part").rename(folder / file)
        weight_map |= dict.fromkeys((slice_of(name).stack for name in names), file)
    if len(shards) > 1:
        _write_index(folder, weight_map, total_bytes)
    return dtypes


def _shard_name(number: int, of: int) -> str:
    return SINGLE if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def _write_index(folder: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _num_bytes(shapes: Iterable[Shape], dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
