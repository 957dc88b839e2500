"""Read and write a safetensors file tensor by tensor.

For the format see `headers`. The library writes a file from tensors that are all in memory, and
reads through a memory map, which ends the process where the file has become shorter. Here a tensor
is one read and one write, and no more than one of them is in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from gapo_megatron.errors import ConversionError
from gapo_megatron.formats.headers import DTYPES, Header
from gapo_megatron.formats.quantized import Quantized, dequantized
from gapo_megatron.formats.stacks import slice_of, stacked
from gapo_megatron.io.huge_pages import empty
from gapo_megatron.models.rules import Shape

_NAMES = {getattr(torch, of_torch): name for name, of_torch in DTYPES.items()}


def read_tensor(path: Path, name: str, header: Header) -> Tensor:
    """Read one tensor; it owns its memory. A quantized one becomes bfloat16.

    Raises:
        ConversionError: the file cannot be read, or has become shorter; or see `dequantized`.
    """
    if isinstance(header, Quantized):
        numbers, scales = (
            read_tensor(path.with_name(part.file), name, part)
            for part in (header.numbers, header.scales)
        )
        return dequantized(numbers, scales, header.block, name=f"{path}: {name}")
    tensor = empty(header.shape, getattr(torch, header.dtype))
    buffer, done = _bytes_of(tensor), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while done < len(buffer):
                got = os.preadv(file.fileno(), [buffer[done:]], header.offset + done)
                if not got:
                    raise ConversionError(f"{path} ends within {name}")
                done += got
    except OSError as error:
        raise ConversionError(f"cannot read {name} from {path}: {error.strerror}") from None
    return tensor


def write_file(
    path: Path,
    layout: Mapping[str, tuple[Shape, torch.dtype]],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a file, and flush it to disk.

    Args:
        path: a file that does not exist.
        layout: shape and dtype of every tensor; those of experts may be stacked in the file.
        tensors: the tensors of `layout`, in any order, on any device; consumed one by one.

    Raises:
        ConversionError: the file cannot be written (names file and tensor), or the tensors differ
            from `layout`.
    """
    # Wide dtypes first, so that every tensor is aligned to its dtype.
    in_file = stacked(layout)
    names = sorted(in_file, key=lambda name: -in_file[name][1].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in names:
        shape, dtype = in_file[name]
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        offsets[name] = begin
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    # The header comes first, so the tensors may then arrive in any order.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start, name, missing = 8 + len(text), "the header", set(layout)
    try:
        with open(path, "xb", buffering=0) as file:
            _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text), 0)
            for name, tensor in tensors:
                shape, dtype = layout[name]
                if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                    raise ConversionError(
                        f"{path}: {name} is {list(tensor.shape)} {tensor.dtype}; "
                        f"it should be {list(shape)} {dtype}"
                    )
                content = _bytes_of(tensor.detach().cpu().contiguous())
                stack, expert = slice_of(name)
                offset = start + offsets[stack] + (expert or 0) * len(content)
                _write(file.fileno(), content, offset)
                missing.remove(name)
            os.fsync(file.fileno())
    except OSError as error:
        raise ConversionError(f"cannot write {name} to {path}: {error.strerror}") from None
    if missing:
        raise ConversionError(f"{path}: never received {', '.join(sorted(missing))}")


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        done = os.pwrite(descriptor, content, offset)
        content, offset = content[done:], offset + done
