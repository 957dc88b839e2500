"""The pickles of a Megatron folder, read as data: nothing that they name is imported or called.

`.metadata` says where each tensor lies; common.pt, or an object beside the tensors, has all else. A
pickle may name any function to call. These name classes of torch and Megatron-core: stand-ins are
made in their place, and what is needed is copied from them.
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gapo_megatron.errors import ConversionError
from gapo_megatron.hf.manifest import is_plain_name
from gapo_megatron.io.documents import open_file

# What a damaged pickle raises, on its way through an unpickler or while it is looked at.
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, OSError, ImportError, MemoryError, OverflowError),
    *(AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
_MAX_BYTES = 2**30
"""Largest pickle that is read: a `.metadata` has some 300 bytes for each tensor."""
_MAX_ITEMS = 10_000
"""Items of one tuple, and of the tuples in it."""
# Of libraries, in what they write: not data for us, and harmless.
_KNOWN = re.compile(
    r"torch\.distributed\.(checkpoint|_shard)\.[\w.]+|torch\.serialization\._get_layout"
    r"|megatron\.core\.[\w.]+|types\.SimpleNamespace|pathlib\.(_local\.)?\w*Path"
    r"|signal\.Signals|_io\.BytesIO"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+|_?core\.multiarray\.(_reconstruct|scalar))"
)
# Transformer Engine unpickles what it keeps, whatever that names. These it does name, by the list
# that Megatron-core 0.19 has of them.
_EXTRA_STATE = re.compile(
    r"transformer_engine\.common\.recipe\.(_?Format(Helper)?|MMParams|QParams|[A-Za-z0-9]+Scaling)"
    r"|megatron\.core\.extensions\.transformer_engine\.TEDelayedScaling"
    r"|collections\.OrderedDict|builtins\.(dict|list|tuple|int|float|bool|bytes|str)|torch\.Size"
    r"|torch\.(_utils\._rebuild_tensor_v2|_tensor\._rebuild_from_type_v2|storage\.UntypedStorage)"
    r"|numpy\.(ndarray|dtype|_core\.multiarray\._reconstruct)"
)
# Where Megatron-core keeps what is no tensor: since 0.17 in an object, before in common.pt.
_COMMON_OBJECT = "common_state/shard_0_1"


def read_metadata(root: Path) -> Metadata:
    """What `.metadata` says: names, shapes and types of tensors, and where each part of them lies.

    Raises:
        ConversionError: it is missing, damaged or misshapen, names a function to call, or a file
            outside of the folder.
    """
    path = root / ".metadata"
    try:
        with open_file(path) as file:
            content = io.BytesIO(file.read(_MAX_BYTES))
        _check_pickle(content)
        content.seek(0)
        return _metadata_of(_MetadataUnpickler(content, path).load())
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing") from None
    except ConversionError:
        raise
    except _DAMAGE as error:
        raise ConversionError(f"{path} is damaged: {error}") from None


def read_common(root: Path, metadata: Metadata) -> dict[str, Any]:
    """What a folder holds besides tensors; objects of libraries are empty stand-ins.

    Raises:
        ConversionError: it is missing, damaged or no dictionary, or names a function to call.
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


def explain(error: BaseException) -> str:
    """An error in one line; of torch's unpickler without the advice to let it run all the same."""
    text = " ".join(str(error).split())
    found = isinstance(error, pickle.UnpicklingError) and re.search(r"GLOBAL (\S+)", text)
    return f"it would run {found[1]}, which is no data" if found else text


def check_extra_state(value: Any, *, source: str) -> None:
    """Refuse an `_extra_state` that Transformer Engine would run something of.

    Raises:
        ConversionError: names source and function, or says that it is damaged.
    """
    content: Any = value
    if isinstance(value, torch.Tensor):
        content = io.BytesIO(value.detach().cpu().numpy().tobytes())
    if not isinstance(content, io.BytesIO) or not content.getbuffer():
        return  # none is kept
    try:
        if isinstance(value, io.BytesIO):  # as it was kept once
            _load(io.BytesIO(content.getvalue()), Path(source))
        else:
            _check_pickle(content)
            content.seek(0)
            _ExtraStateUnpickler(content, Path(source)).load()
    except ConversionError:
        raise
    except _DAMAGE as error:
        raise ConversionError(f"{source} is damaged: {explain(error)}") from None


class _Opaque:
    """Stands in for a library's object: what it was made with, and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self._path = path
        self._classes: dict[str, type[_Opaque]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in, made for this file alone: a pickle can change the classes that it names."""
        full = f"{module}.{name}"
        if full == "torch.Size":
            return torch.Size  # of numbers alone
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if not _KNOWN.fullmatch(full):
            raise _foreign(self._path, [full])
        return self._classes.setdefault(full, type(name, (_Opaque,), {}))


class _ExtraStateUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "torch.storage._load_from_bytes":  # a pickle within the pickle
            return _load_storage
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if not _EXTRA_STATE.fullmatch(full):
            raise _foreign(self._path, [full])
        return type(name, (_Opaque, dict if full.startswith("collections.") else object), {})


def _load(file: Any, path: Path) -> Any:
    """As `torch.load`, of data alone."""
    with torch.serialization._open_zipfile_reader(file) as reader:
        _check_pickle(io.BytesIO(reader.get_record("data.pkl")))
    file.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if foreign := [n for n in names if n != "argparse.Namespace" and not _KNOWN.fullmatch(n)]:
        raise _foreign(path, foreign)
    allowed: list[Any] = [(_Opaque, name) for name in names if name != "argparse.Namespace"]
    if argparse.Namespace not in torch.serialization.get_safe_globals():
        # Not otherwise: Megatron-core allows it for good, and leaving the block forbids it.
        allowed.append(argparse.Namespace)
    file.seek(0)
    with torch.serialization.safe_globals(allowed):
        return torch.load(file, map_location="cpu", weights_only=True)


def _load_storage(content: bytes) -> Any:
    """What a storage pickles itself with: `torch.save`'s older format, of five pickles."""
    file = io.BytesIO(content)
    for _ in range(5):
        _check_pickle(file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _check_pickle(file: io.BytesIO) -> None:
    """Refuse a pickle that would end the process; leaves the file behind the pickle.

    A tuple is hashed, as a dictionary's key, with all that is in it: one that is too deep overflows
    the stack, and one that holds another twice, which holds another twice ..., takes for ever. The
    unpickler makes a table as long as the largest index under which something is remembered.
    """
    sizes: list[int] = []  # of what is on the unpickler's stack: how much its hash looks at
    marks: list[int] = []
    memo: dict[int, int] = {}
    operations: Iterator[tuple[Any, Any, Any]] = pickletools.genops(file)
    for count, (opcode, argument, _) in enumerate(operations):
        name, before = opcode.name, opcode.stack_before
        if name == "MARK":
            marks.append(len(sizes))
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            sizes.append(memo[argument])
        elif name == "MEMOIZE":
            memo[len(memo)] = sizes[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            if argument > count:
                raise ValueError(f"{name} {argument} after {count} operations")
            memo[argument] = sizes[-1]
        elif not before:
            sizes += [1] * len(opcode.stack_after)
        elif name in ("POP", "POP_MARK", "DUP"):
            raise ValueError(f"{name}, which data does not need")
        else:
            start = len(sizes) - len(before)
            if pickletools.markobject in before:
                start = marks.pop() - before.index(pickletools.markobject)
            if start < (marks[-1] if marks else 0):
                raise ValueError(f"{name} without anything to work on")
            taken = sizes[start:]
            # Of others the first may stay as it is. Lists are not hashed, nor what is in an object.
            size = 1 + sum(taken) if name.startswith("TUPLE") else taken[0] if taken else 1
            if size > _MAX_ITEMS:
                raise ValueError(f"a tuple of more than {_MAX_ITEMS} items")
            sizes[start:] = [size] * len(opcode.stack_after)


def _foreign(path: Path, names: list[str]) -> ConversionError:
    return ConversionError(
        f"{path} refused: it would run {', '.join(sorted(names))}, which is no data"
    )


# --- from stand-ins to torch's classes -----------------------------------------------------------


def _metadata_of(found: Any) -> Metadata:
    fields = _fields(found, "Metadata")
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
        fields = _fields(entry, "TensorStorageMetadata")
        dtype, *_ = _of(fields["properties"], "TensorProperties").state
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {reprlib.repr(dtype)} of {key}")
        parts = [_fields(part, "ChunkStorageMetadata") for part in fields["chunks"]]
        chunks = [ChunkStorageMetadata(_size(one["offsets"]), _size(one["sizes"])) for one in parts]
        properties = TensorProperties(dtype=dtype)
        yield key, TensorStorageMetadata(properties, _size(fields["size"]), chunks)


def _places(found: Mapping[Any, Any]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for index, info in found.items():
        where, at = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
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
            _StorageInfo(name, _count(at["offset"]), _count(at["length"])),
        )


def _of(value: Any, kind: str) -> _Opaque:
    if not isinstance(value, _Opaque) or type(value).__name__ != kind:
        raise ValueError(f"{type(value).__name__} in place of {kind}")
    return value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    state = _of(value, kind).state
    if not isinstance(state, dict):
        raise ValueError(f"{kind} without fields")
    return state


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise ValueError(f"{reprlib.repr(value)} in place of a size")
    return torch.Size(map(_count, value))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{reprlib.repr(value)} in place of a number of elements or bytes")
    return value
