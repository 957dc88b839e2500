"""Read a tensor of a torch.distributed.checkpoint folder from its chunks."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from gapo_megatron.compat.torch import file_view
from gapo_megatron.errors import ConversionError
from gapo_megatron.formats.unpickle import load_data
from gapo_megatron.io.documents import open_file
from gapo_megatron.io.huge_pages import empty
from gapo_megatron.models.rules import Shape


class Chunks:
    """The chunks of one tensor, which together cover it.

    Attributes:
        ends: by file, the least size in bytes that it must have.
    """

    def __init__(
        self,
        root: Path,
        key: str,
        entry: TensorStorageMetadata,
        storage_data: Mapping[MetadataIndex, Any],
        num_stacked: int,
    ) -> None:
        """Check that every element is in exactly one chunk; reads no tensor.

        Args:
            root: folder of the files.
            key: the tensor's key, for errors.
            entry: the tensor in `.metadata`.
            storage_data: location of every chunk, from `.metadata`.
            num_stacked: number of leading dimensions in which parameters are stacked.

        Raises:
            ConversionError: a chunk is in no file, lies outside of the tensor or overlaps another,
                or an element is in no chunk; names key and chunk.
        """
        self._root, self._key, self._dtype = root, key, entry.properties.dtype
        self.ends: dict[str, int] = {}
        self._at: dict[tuple[int, ...], list[tuple[ChunkStorageMetadata, Any]]] = {}
        # Sort the chunks by the parameters of the stack that they hold a part of.
        for chunk in entry.chunks:
            where = f"{root}: {key} at {list(chunk.offsets)}"
            if not _is_inside(chunk, entry.size):
                raise ConversionError(
                    f"{where} of {list(chunk.sizes)} is outside of {list(entry.size)}"
                )
            info = storage_data.get(MetadataIndex(key, chunk.offsets))
            if info is None:
                raise ConversionError(f"{where} is in no file")
            file, end = info.relative_path, info.offset + info.length
            self.ends[file] = max(self.ends.get(file, 0), end)
            spans = zip(chunk.offsets[:num_stacked], chunk.sizes[:num_stacked], strict=True)
            for index in itertools.product(*(range(start, start + n) for start, n in spans)):
                self._at.setdefault(index, []).append((chunk, info))
        # Chunks inside the tensor that do not overlap cover it if they have as many elements.
        for parts in self._at.values():
            for (one, _), (other, _) in itertools.combinations(parts, 2):
                if _overlap(one, other):
                    raise ConversionError(
                        f"{root}: {key} at {list(one.offsets)} and {list(other.offsets)} overlap"
                    )
        held = sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
        if held != entry.size.numel():
            raise ConversionError(
                f"{root}: the chunks of {key} have {held} elements, the tensor {entry.size.numel()}"
            )

    def files(self, index: tuple[int, ...]) -> set[str]:
        """Names of the files that hold the parameter at `index` of the stacked dimensions."""
        return {info.relative_path for _, info in self._at[index]}

    @property
    def first_file(self) -> str:
        return next(iter(self.ends))

    def read(self, index: tuple[int, ...], shape: Shape) -> Tensor:
        """Read the parameter at `index` of the stacked dimensions, up to `shape`."""
        starts = (*index, *(0 for _ in shape))
        sizes = (*(1 for _ in index), *shape)
        target: Tensor | None = None
        for chunk, info in self._at[index]:
            low = [max(a, b) for a, b in zip(starts, chunk.offsets, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(starts, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue  # vocabulary padding
            whole = self._load(chunk, info)
            part = whole[_slices(low, high, chunk.offsets)]
            if part.shape == sizes:
                return (part if part.numel() == whole.numel() else part.clone()).reshape(shape)
            target = empty(sizes, self._dtype) if target is None else target
            target[_slices(low, high, starts)].copy_(part)
        assert target is not None, (self._key, index)  # the chunks cover the tensor, see __init__
        return target.reshape(shape)

    def _load(self, chunk: ChunkStorageMetadata, info: Any) -> Tensor:
        path = self._root / info.relative_path
        at = f"{path}: {self._key} at {list(chunk.offsets)}"
        try:
            with open_file(path) as file:
                part = file_view(file, info.offset, info.length)
                tensor = load_data(part, map_location="cpu")
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise ConversionError(f"{at} cannot be read: {error}") from None
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (
            chunk.sizes,
            self._dtype,
        ):
            raise ConversionError(f"{at} is not {list(chunk.sizes)} {self._dtype}")
        return tensor


def _slices(low: Sequence[int], high: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for a, b, c in zip(low, high, start, strict=True))


def _is_inside(chunk: ChunkStorageMetadata, size: Sequence[int]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    spans = zip(chunk.offsets, chunk.sizes, size, strict=True)
    return all(0 <= start <= start + n <= whole for start, n, whole in spans)


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in spans)
