"""Hugging Face model folders: read tensor by tensor, written whole or not at all."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from gapo_megatron.convert import shard
from gapo_megatron.convert.folder import MARKER_NAME, REPORT_NAME, is_marked, mark, new_folder
from gapo_megatron.convert.rules import Place, Rule, Shape, checked, hf_shapes
from gapo_megatron.convert.tables import rules_for
from gapo_megatron.convert.workers import Read, worker_pool
from gapo_megatron.errors import ConfigError, ConversionError

MAX_SHARD_BYTES = 5 * 2**30
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_NOT_CARRIED = (*_WEIGHT_SUFFIXES, ".index.json", REPORT_NAME, MARKER_NAME)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a folder, as its headers describe it."""

    shape: Shape
    dtype: torch.dtype
    file: str
    """Name in the folder; of the first part of a tensor that is stored in parts."""


class HfFolder:
    """A Hugging Face model folder, open for reading.

    Attributes:
        root: the folder.
        entries: every tensor by name, in the order of the folder.
    """

    def __init__(self, hf_dir: str | Path) -> None:
        """Check that the folder is complete; reads headers only.

        Raises:
            ConfigError: see `check_hf_dir`; also a file that is truncated.
            ConversionError: the index names a tensor its file does not hold, or leaves one out.
        """
        self.root = Path(hf_dir)
        files = check_hf_dir(self.root)
        headers = {file: shard.read_header(self.root / file) for file in set(files.values())}
        for file, header in headers.items():
            listed = {name for name, home in files.items() if home == file}
            if odd := sorted(header.keys() ^ listed):
                raise ConversionError(
                    f"{self.root / file} and {_INDEX} disagree about: {', '.join(odd[:8])}"
                )
        self._stored = {name: headers[file][name] for name, file in files.items()}
        self.entries = {
            name: Entry(stored.shape, stored.dtype, files[name])
            for name, stored in self._stored.items()
        }

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype of the file; it owns its memory.

        Thread-safe.

        Raises:
            ConversionError: the file cannot be read; names file and tensor.
        """
        path = self.root / self.entries[name].file
        return shard.read_tensor(path, name, self._stored[name])


def check_hf_dir(hf_dir: str | Path) -> dict[str, str]:
    """Check that a model folder is complete, without reading a tensor.

    Returns:
        File of every tensor (name -> file name in the folder), in the order of the folder.

    Raises:
        ConfigError: folder, config.json or a weight file is missing or unreadable; names it. Or
            there are weights of two models.
    """
    root = Path(hf_dir)
    if not root.is_dir():
        raise ConfigError(f"model folder {root} does not exist")
    _read_json(root, "config.json")
    if (root / _INDEX).exists():
        weight_map = _read_json(root, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{root / _INDEX} has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise ConfigError(f"{root / _INDEX}: {name} is in {file!r}: must be a file's name")
        lost = sorted({file for file in weight_map.values() if not (root / file).is_file()})
        if lost:
            raise ConfigError(
                f"model folder {root}: {_INDEX} names missing files: {', '.join(lost)}"
            )
        if (root / _SINGLE).is_file() and _SINGLE not in weight_map.values():
            raise ConfigError(
                f"model folder {root} holds two models, {_SINGLE} and what {_INDEX} lists: some "
                "programs read the one, some the other"
            )
        return weight_map
    if not (root / _SINGLE).is_file():
        raise ConfigError(f"model folder {root} has neither {_SINGLE} nor {_INDEX}")
    return dict.fromkeys(shard.read_header(root / _SINGLE), _SINGLE)


def read_hf(hf_dir: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Stream every tensor of a model folder; one is in memory at a time.

    Yields:
        (Hugging Face name, whole tensor on the CPU in the dtype of the file).

    Raises:
        ConfigError, ConversionError: see `HfFolder`; raised by the call itself, before the first
            tensor.
    """
    folder = HfFolder(hf_dir)
    return ((name, folder.read(name)) for name in folder.entries)


def write_hf(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source_dir: str | Path,
    output_dir: str | Path,
    made_by: str,
    or_unmarked: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    write: bool = True,
) -> None:
    """Write a model folder that transformers and vLLM load.

    `output_dir` never holds half a model, see `new_folder`. One file's tensors are in memory.

    Args:
        tensors: (Hugging Face name, whole tensor) in any order, on any device. Read to its end also
            where `write` is False, because making it may be collective.
        source_dir: folder whose config.json says which tensors there must be, and whose files other
            than weights (config, tokenizer, generation config) are carried over. config.json comes
            to name the dtype of the tensors, if they have one.
        output_dir: folder to make, or an earlier result of the same command to replace.
        made_by: the command.
        or_unmarked: a folder that does not say who made it counts as its own, too.
        max_shard_bytes: of one file, unless a single tensor is larger.
        write: False on every rank but one.

    Raises:
        ConfigError: `source_dir` has no usable config.json; `output_dir` may not be replaced (see
            `check_replaceable`), or is on a disk without space.
        ConversionError: a tensor is missing, extra, twice or misshapen; names it. Or the disk
            fails.
    """
    source = Path(source_dir)
    _read_json(source, "config.json")
    rules = rules_for(AutoConfig.from_pretrained(source))
    tensors = checked(rules, tensors)
    if not write:
        for _ in tensors:
            pass
        return
    first = next(tensors)  # its dtype stands for all of them: the space is about what they need
    num_bytes = _num_bytes(hf_shapes(rules).values(), first[1].dtype)
    is_ours = is_marked(output_dir, made_by=made_by, or_unmarked=or_unmarked)
    with new_folder(output_dir, num_bytes=num_bytes, replace=True, is_ours=is_ours) as temporary:
        dtypes = _write_stream(itertools.chain([first], tensors), temporary, max_shard_bytes)
        carry_over(source, temporary, dtype=dtypes.pop() if len(dtypes) == 1 else None)
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
    """Write the safetensors files (and their index) of a model, several at a time.

    A thread holds one Megatron parameter and the tensors it is cut into.

    Args:
        read: gives a whole Megatron parameter in its dtype; called from several threads, and again
            for each of its tensors where they do not fit into one file.
        rules: of the model.
        dtypes: of every parameter, by `Rule.megatron`.
        output_dir: an existing folder without weights; see `new_folder`.
        max_shard_bytes: of one file, unless a single tensor is larger.
        num_threads: files written at a time.
        on_bytes: called with the bytes of tensors that have been written, from several threads.

    Raises:
        ConversionError: a parameter has another shape or dtype than `rules` and `dtypes` say, or
            the disk fails; names file and tensor.
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
        for future in as_completed(futures):  # the first failure ends it
            future.result()
    if len(shards) > 1:
        homes = {
            name: file
            for file, units in zip(names, shards, strict=True)
            for unit in units
            for name in unit.layout
        }
        _write_index(output_dir, homes, sum(unit.num_bytes for units in shards for unit in units))


def in_model_order(rules: Sequence[Rule]) -> list[tuple[Rule, Place]]:
    """Every parameter (tied copies left out), layer by layer: the order of most folders' files."""
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


def non_weight_files(folder: str | Path) -> list[Path]:
    """What is carried along beside the weights: config, tokenizer, chat template, and so on."""
    return sorted(
        path
        for path in Path(folder).iterdir()
        if not path.is_dir() and not path.name.endswith(_NOT_CARRIED)
    )


def carry_over(source: Path, target: Path, *, dtype: torch.dtype | None = None) -> None:
    """Copy what is not weights; config.json names the weights' dtype, if one is given."""
    for path in non_weight_files(source):
        shutil.copyfile(path, target / path.name)
    if dtype is not None:
        config = _read_json(source, "config.json")
        config.pop("torch_dtype", None)  # the key's name before transformers 5
        config["dtype"] = str(dtype).removeprefix("torch.")
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (target / "config.json").write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tensors of one parameter that go into one file."""

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
    for rule, place in in_model_order(rules):
        dtype = dtypes[rule.megatron]
        layout = {
            name: (shape, dtype)
            for name, shape in zip(rule.hf_names(place), rule.hf_shapes, strict=True)
        }
        whole = _Unit(rule, place, layout)
        units = [whole]
        if whole.num_bytes > max_bytes:
            units = [_Unit(rule, place, {name: of}) for name, of in layout.items()]
        for unit in units:
            if shards[-1] and unit.num_bytes > room:
                shards.append([])
                room = max_bytes
            shards[-1].append(unit)
            room -= unit.num_bytes
    return shards


def _write_stream(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    max_shard_bytes: int,
) -> set[torch.dtype]:
    """Write tensors as they come; how many files they make is known at the end."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    dtypes: set[torch.dtype] = set()
    pending_bytes = total_bytes = 0

    def flush() -> None:
        shards.append(list(pending))
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pending.items()}
        shard.write_file(folder / f"{len(shards)}.part", layout, pending.items())
        pending.clear()

    for name, tensor in tensors:
        # A copy of its own: the source may reuse the memory for the next one.
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        dtypes.add(tensor.dtype)
    flush()
    homes: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = _shard_name(number, len(shards))
        (folder / f"{number}.part").rename(folder / file)
        homes |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_index(folder, homes, total_bytes)
    return dtypes


def _shard_name(number: int, of: int) -> str:
    return _SINGLE if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def _write_index(folder: Path, homes: Mapping[str, str], num_bytes: int) -> None:
    index = {"metadata": {"total_size": num_bytes}, "weight_map": homes}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _num_bytes(shapes: Iterable[Shape], dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize


def _read_json(root: Path, name: str) -> dict:
    try:
        content = json.loads((root / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model folder {root} has no {name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{root / name} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{root / name} holds {content!r:.40}, not a table")
    return content
