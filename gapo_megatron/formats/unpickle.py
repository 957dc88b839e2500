"""The pickles of a Megatron folder, read as data: nothing that they name is imported or called.

`.metadata` says where each tensor is stored; common.pt, or an object beside the tensors, has
everything else. A pickle may name any function to call. These name classes of torch and
Megatron-core: each name must be on a list, and a stand-in takes its place.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gapo_megatron.compat.torch import pickle_in, storage_info
from gapo_megatron.errors import ConversionError, printable
from gapo_megatron.formats.manifest import is_plain_name
from gapo_megatron.io.documents import open_file

# What a damaged pickle raises while it is read, and while its content is checked.
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, OSError, ImportError, MemoryError, OverflowError),
    *(AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
_MAX_BYTES = 2**30
"""Largest pickle that is read; a `.metadata` has some 300 bytes per tensor."""
# Names in what libraries write: nobody here uses these objects, and their stand-ins are harmless.
_METADATA = re.compile(
    r"torch\.distributed\.(checkpoint|_shard)\.([a-z_]\w*\.)*_?[A-Z]\w*"
    r"|torch\.serialization\._get_layout|megatron\.core\.([a-z_]\w*\.)+_?[A-Z]\w*|types\.SimpleNamespace|pathlib\.(_local\.)?\w*Path"
    r"|signal\.Signals|_io\.BytesIO"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+|_?core\.multiarray\.(_reconstruct|scalar))"
)
_COMMON = re.compile(rf"{_METADATA.pattern}|argparse\.Namespace")
# Transformer Engine unpickles what it keeps, whatever that names. These are the names that it
# writes, from Megatron-core 0.19's list of them.
_EXTRA_STATE = re.compile(
    r"transformer_engine\.common\.recipe\.(_?Format(Helper)?|MMParams|QParams|[A-Za-z0-9]+Scaling)"
    r"|megatron\.core\.extensions\.transformer_engine\.TEDelayedScaling"
    r"|collections\.OrderedDict|builtins\.(dict|list|tuple|int|float|bool|bytes|str)|torch\.Size"
    r"|torch\.(_utils\._rebuild_tensor_v2|_tensor\._rebuild_from_type_v2|storage\.UntypedStorage)"
    r"|torch\.storage\._load_from_bytes|megatron\.core\.safe_globals\.safe_load_from_bytes"
    r"|numpy\.(ndarray|dtype|_core\.multiarray\._reconstruct)"
)
_ANY = re.compile(r".*", re.DOTALL)
# Where Megatron-core keeps what is no tensor: since 0.17 in an object, before in common.pt.
_COMMON_OBJECT = "common_state/shard_0_1"


def read_metadata(root: Path) -> Metadata:
    """Read `.metadata`: names, shapes and dtypes of tensors, and the file of each of their parts.

    Raises:
        ConversionError: it is missing, damaged or misshapen, or names a function to call or a file
            outside of the folder.
    """
    path = root / ".metadata"
    try:
        with open_file(path) as file:
            content = io.BytesIO(file.read(_MAX_BYTES))
        return _metadata_of(_DataUnpickler(content, path, _METADATA).load())
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing") from None
    except ConversionError:
        raise
    except _DAMAGE as error:
        raise ConversionError(f"{path} is damaged: {error}") from None


def read_common(root: Path, metadata: Metadata) -> dict[str, Any]:
    """Read what a folder holds besides tensors; objects of libraries become stand-ins.

    Raises:
        ConversionError: it is missing, damaged or not a dictionary, or names a function to call.
    """
    path, at = root / "common.pt", metadata.storage_data.get(MetadataIndex(_COMMON_OBJECT))
    try:
        if at is None or path.exists():
            with open_file(path) as file:
                common = _load(file, path)
        else:
            path = root / at.relative_path
            with open_file(path) as file:
                file.seek(at.offset)
                common = _load(io.BytesIO(file.read(at.length)), path)
            (common,) = common
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing") from None
    except ConversionError:
        raise
    except _DAMAGE as error:
        raise ConversionError(f"{path} is damaged: {explain(error)}") from None
    if not isinstance(common, dict):
        raise ConversionError(f"{path} holds {type(common).__name__}, not a dictionary")
    return common


def load_data(file: Any, **options: Any) -> Any:
    """Read a file of `torch.save` that holds tensors and plain values alone.

    Args:
        file: opened, at its start.
        options: options of `torch.load`.

    Raises:
        pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError: it is damaged, or holds
            something else.
    """
    try:
        return torch.load(file, weights_only=True, **options)
    except (AttributeError, LookupError, MemoryError, OverflowError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def check_extra_state(value: Any, *, source: str) -> None:
    """Refuse an `_extra_state` with anything that Transformer Engine would run on unpickling it.

    Raises:
        ConversionError: names source and function, or says that it is damaged.
    """
    content: Any = value
    if isinstance(value, torch.Tensor):
        content = io.BytesIO(value.detach().cpu().numpy().tobytes())
    if not isinstance(content, io.BytesIO) or not content.getbuffer():
        return  # none is kept
    try:
        if isinstance(value, io.BytesIO):  # older versions kept a file of torch.save
            _load(io.BytesIO(content.getvalue()), Path(source))
        else:
            _DataUnpickler(content, Path(source), _EXTRA_STATE).load()
    except ConversionError:
        raise
    except _DAMAGE as error:
        raise ConversionError(f"{source} is damaged: {explain(error)}") from None


def explain(error: BaseException) -> str:
    """An error in one line; of torch's unpickler, without the advice to trust the file."""
    text = printable(" ".join(str(error).split()))
    found = isinstance(error, pickle.UnpicklingError) and re.search(r"GLOBAL (\S+)", text)
    return f"it would run {found[1]}, which is no data" if found else text


class _StandIn:
    """Takes the place of a library's object, and keeps only its state."""

    state: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DataUnpickler(pickle.Unpickler):
    """Makes a stand-in of every object whose name is on a list, and refuses all others."""

    def __init__(self, file: io.BytesIO, path: Path, known: re.Pattern[str]) -> None:
        super().__init__(file)
        self._path, self._known = path, known
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in, made for this file alone: a pickle can change the classes that it names."""
        full = f"{module}.{name}"
        if full == "torch.Size":
            return torch.Size  # of numbers alone
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if not self._known.fullmatch(full):
            raise _foreign(self._path, [full])
        # Megatron-core puts its own function in the place of torch's.
        if name in ("_load_from_bytes", "safe_load_from_bytes"):
            return lambda content: self._load_storage(content)  # a pickle can change what it gets
        bases: tuple[type, ...] = (_StandIn,)
        if full == "argparse.Namespace":
            bases = (argparse.Namespace,)
        elif module == "collections":
            bases = (_StandIn, dict)
        if full not in self._classes:
            self._classes[full] = type(name, bases, {})
        return self._classes[full]

    def persistent_load(self, _: Any) -> None:
        """The storage of a tensor in common.pt; no such tensor is used."""

    def _load_storage(self, content: bytes) -> Any:
        """Check the pickle inside the pickle: `torch.save`'s older format, of five pickles."""
        file = io.BytesIO(content)
        for _ in range(5):
            _DataUnpickler(file, self._path, _ANY).load()  # torch knows which names it writes
        file.seek(0)
        return torch.load(file, weights_only=True)


def _load(file: Any, path: Path) -> Any:
    """Read a file of `torch.save`, with stand-ins."""
    content = io.BytesIO(pickle_in(file))
    file.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)  # torch knows its own
    if foreign := [name for name in names if not _COMMON.fullmatch(name)]:
        raise _foreign(path, foreign)
    return _DataUnpickler(content, path, _ANY).load()


def _foreign(path: Path, names: list[str]) -> ConversionError:
    return ConversionError(
        f"{path} refused: it would run {', '.join(sorted(names))}, which is no data"
    )


# --- from stand-ins to torch's classes, with every field checked ---------------------------------


def _metadata_of(found: Any) -> Metadata:
    fields = _state(found, "Metadata")
    version = fields.get("version")
    if not isinstance(version, str | None):
        raise ValueError(f"version {reprlib.repr(version)}")
    return Metadata(
        state_dict_metadata=dict(_entries(fields["state_dict_metadata"])),
        storage_data=dict(_places(fields["storage_data"])),
        version=version,
    )


def _entries(
    found: Mapping[Any, Any],
) -> Iterator[tuple[str, TensorStorageMetadata | BytesStorageMetadata]]:
    for key, entry in found.items():
        if not isinstance(key, str):
            raise ValueError(f"key {reprlib.repr(key)}")
        if type(entry).__name__ == "BytesStorageMetadata":
            yield key, BytesStorageMetadata()
            continue
        fields = _state(entry, "TensorStorageMetadata")
        dtype, *_ = _state(fields["properties"], "TensorProperties", tuple)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {reprlib.repr(dtype)} of {key}")
        parts = [_state(part, "ChunkStorageMetadata") for part in fields["chunks"]]
        chunks = [ChunkStorageMetadata(_size(one["offsets"]), _size(one["sizes"])) for one in parts]
        properties = TensorProperties(dtype=dtype)
        yield key, TensorStorageMetadata(properties, _size(fields["size"]), chunks)


def _places(found: Mapping[Any, Any]) -> Iterator[tuple[MetadataIndex, Any]]:
    for index, info in found.items():
        where, at = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        name, key, offset = at["relative_path"], where["fqn"], where.get("offset")
        if not isinstance(key, str):
            raise ValueError(f"key {reprlib.repr(key)}")
        if not isinstance(name, str) or not is_plain_name(name):
            shown = reprlib.repr(name)
            raise ValueError(f"{key} in {shown}, which names no file inside of the folder")
        if at.get("transform_descriptors"):
            raise ValueError(f"{key} is stored as {reprlib.repr(at['transform_descriptors'])}")
        yield (
            MetadataIndex(key, None if offset is None else _size(offset)),
            storage_info(name, _count(at["offset"]), _count(at["length"])),
        )


def _state(value: Any, kind: str, form: type = dict) -> Any:
    """The state of a stand-in for torch's class `kind`."""
    if not isinstance(value, _StandIn) or type(value).__name__ != kind:
        raise ValueError(f"{type(value).__name__} in place of {kind}")
    if not isinstance(value.state, form):
        raise ValueError(f"{kind} without fields")
    return value.state


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError(f"{reprlib.repr(value)} in place of a size")
    return torch.Size(map(_count, value))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{reprlib.repr(value)} in place of a number of elements or bytes")
    return value
