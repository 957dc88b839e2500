"""Read the index and the file headers of a Hugging Face folder. Imports no torch.

A safetensors file is a length of 8 bytes, a JSON header with every tensor's offsets, and the
tensors' bytes. The library checks that these fit together. Checked here is what it accepts: a
tensor that is named twice, an unknown field, other spellings of the same header, and dtypes that
are not read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.io.documents import open_file, parse_json, read_object
from gapo_megatron.models.rules import Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Supported dtypes: the format's name -> torch's name."""
_ITEM_BYTES = {
    of_torch: int(re.sub(r"_.*|\D", "", name) or 8) // 8 for name, of_torch in DTYPES.items()
}


def item_bytes(dtype: str) -> int:
    """Bytes of an element, by torch's name of its dtype."""
    return _ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor, as the header of its file describes it."""

    shape: Shape
    dtype: str
    """Torch's name of it, e.g. "bfloat16"."""
    file: str
    """Name in the folder."""
    offset: int
    """From the start of the file, in bytes."""


def find_files(hf_dir: str | Path) -> dict[str, str]:
    """Check that a model folder is complete, without reading a tensor.

    Returns:
        Tensor name -> file name in the folder, in the order of the index.

    Raises:
        ConfigError: the folder, config.json or a weight file is missing or unreadable, or there are
            weights of two models; names the file.
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
        # The file may be a link, e.g. into a download cache, but its name must be in the folder.
        is_name = isinstance(file, str) and file == Path(file).name and "\0" not in file
        if not is_name or not file.endswith(".safetensors"):
            raise ConfigError(
                f"{root / INDEX}: {name} is in {ascii(file)[:80]}; must be a .safetensors file in "
                "the folder"
            )
    lost = sorted({file for file in weight_map.values() if not (root / file).is_file()})
    if lost:
        raise ConfigError(f"model folder {root}: {INDEX} names missing files: {', '.join(lost)}")
    if (root / SINGLE).is_file() and SINGLE not in weight_map.values():
        raise ConfigError(
            f"model folder {root} holds two models: {SINGLE}, and the files that {INDEX} lists"
        )
    return weight_map


def read_headers(hf_dir: str | Path) -> dict[str, Header]:
    """Read the headers of all tensors of a model folder, in the order of the index.

    Raises:
        ConfigError, ConversionError: see `find_files` and `read_header`; or the index and a file
            list different tensors.
    """
    root = Path(hf_dir)
    files = find_files(root)
    headers = {file: read_header(root / file) for file in set(files.values())}
    for file, header in headers.items():
        listed = {name for name, holder in files.items() if holder == file}
        if odd := sorted(header.keys() ^ listed):
            raise ConversionError(f"{root / file} and {INDEX} disagree about: {', '.join(odd[:8])}")
    return {name: headers[file][name] for name, file in files.items()}


def read_header(path: Path) -> dict[str, Header]:
    """Read the headers of all tensors of a safetensors file, in the order of the file.

    Raises:
        ConfigError: the file is truncated or damaged, or not a safetensors file.
        ConversionError: a dtype is not supported; names file and tensor.
    """
    broken = f"{path} is not a whole safetensors file"
    try:
        # Opened here first: the library would wait for the other end of a FIFO.
        with open_file(path) as file, safe_open(path, framework="numpy"):
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(f"{broken}: {error}") from None
    if not text.startswith(b"{"):
        raise ConfigError(f"{broken}: its header must begin with {{")
    header = parse_json(text, where=f"{path}: its header")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ConfigError(f"{broken}: {name} must have dtype, shape and data_offsets alone")
        dtype, offset = entry["dtype"], 8 + size + entry["data_offsets"][0]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ConversionError(f"{path}: {name} has dtype {ascii(dtype)[:40]}: not supported")
        tensors[name] = Header(tuple(entry["shape"]), DTYPES[dtype], path.name, offset)
    return tensors
