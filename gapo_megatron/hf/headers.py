"""The tensors of a Hugging Face folder, by its index and the headers of its files. No torch.

A safetensors file is a length of 8 bytes, a JSON header with every tensor's place, and the tensors'
bytes. The library checks the places; here it is checked too what it takes without a word: a tensor
or a field that is named twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.io.documents import open_file, parse_json, read_object
from gapo_megatron.models.rules import Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Dtypes of the format that are read: torch's name and the bytes of a number."""
_MAX_HEADER_BYTES = 100_000_000  # as in the library


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor, as the header of its file describes it."""

    shape: Shape
    dtype: str
    """By torch's name."""
    file: str
    """Name in the folder."""
    offset: int
    """From the start of the file, in bytes."""
    num_bytes: int


def find_files(hf_dir: str | Path) -> dict[str, str]:
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
    try:
        read_object(root / "config.json")
    except FileNotFoundError:
        raise ConfigError(f"model folder {root} has no config.json") from None
    try:
        weight_map = read_object(root / INDEX).get("weight_map")
    except FileNotFoundError:
        if not (root / SINGLE).is_file():
            raise ConfigError(f"model folder {root} has neither {SINGLE} nor {INDEX}") from None
        return dict.fromkeys(read_header(root / SINGLE), SINGLE)
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{root / INDEX} has no weight_map")
    for name, file in weight_map.items():
        # A link may lead anywhere: downloads are links into a cache. The name itself may not.
        is_name = isinstance(file, str) and file == Path(file).name and "\0" not in file
        if not is_name or not file.endswith(".safetensors"):
            raise ConfigError(
                f"{root / INDEX}: {name} is in {ascii(file)[:80]}: must be a .safetensors file's "
                "name in the folder"
            )
    lost = sorted({file for file in weight_map.values() if not (root / file).is_file()})
    if lost:
        raise ConfigError(f"model folder {root}: {INDEX} names missing files: {', '.join(lost)}")
    if (root / SINGLE).is_file() and SINGLE not in weight_map.values():
        raise ConfigError(
            f"model folder {root} holds two models, {SINGLE} and what {INDEX} lists: some "
            "programs read the one, some the other"
        )
    return weight_map


def read_headers(hf_dir: str | Path) -> dict[str, Header]:
    """Every tensor of a model folder, in the order of the folder.

    Raises:
        ConfigError, ConversionError: see `find_files` and `read_header`; or the index names a
            tensor that its file does not hold, or leaves one out.
    """
    root = Path(hf_dir)
    files = find_files(root)
    headers = {file: read_header(root / file) for file in set(files.values())}
    for file, header in headers.items():
        listed = {name for name, home in files.items() if home == file}
        if odd := sorted(header.keys() ^ listed):
            raise ConversionError(f"{root / file} and {INDEX} disagree about: {', '.join(odd[:8])}")
    return {name: headers[file][name] for name, file in files.items()}


def read_header(path: Path) -> dict[str, Header]:
    """Every tensor of a safetensors file, in the order of the header.

    Raises:
        ConfigError: the file is truncated, or no safetensors file.
        ConversionError: a dtype that is not read; names file and tensor.
    """
    broken = f"{path} is not a whole safetensors file"
    try:
        with open_file(path) as file:
            size = int.from_bytes(file.read(8), "little")
            # Of a file that is none of the kind the first bytes are any number.
            text = file.read(size) if size <= _MAX_HEADER_BYTES else b""
            num_bytes = file.seek(0, 2) - 8 - size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) < size or not text.startswith(b"{"):
        raise ConfigError(f"{broken}: its header is cut off, or is none")
    header = parse_json(text, where=f"{path}: its header")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise ConfigError(f"{broken}: __metadata__ must be strings by name")
    tensors = {name: _tensor(path, name, entry, 8 + size) for name, entry in header.items()}
    end = 0
    for name, one in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if one.offset != 8 + size + end:
            raise ConfigError(f"{broken}: {name} does not begin where the tensor before it ends")
        end += one.num_bytes
    if end != num_bytes:
        raise ConfigError(f"{broken}: it has {num_bytes} bytes of tensors, and its header {end}")
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> Header:
    """What the header says of a tensor; `start` is where tensors begin."""
    where = f"{path} is not a whole safetensors file: {name}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ConfigError(f"{where} must have a dtype, a shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConversionError(f"{path}: {name} has dtype {ascii(dtype)[:40]}: not supported")
    for field, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not (isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)):
            raise ConfigError(f"{where}: {field} must be a list of whole numbers of 0 or more")
    name_in_torch, item_bytes = DTYPES[dtype]
    num_bytes = math.prod(shape) * item_bytes
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise ConfigError(
            f"{where}: data_offsets ({offsets[:3]}) must be {num_bytes} apart, which {dtype} of "
            f"{shape[:8]} has in bytes"
        )
    return Header(tuple(shape), name_in_torch, path.name, start + offsets[0], num_bytes)
