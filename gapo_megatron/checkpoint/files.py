"""Files of tensors and plain values in a checkpoint, written durably and checked when read."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gapo_megatron.errors import CheckpointError
from gapo_megatron.formats.unpickle import explain, load_data
from gapo_megatron.io.documents import open_file


def serialise(content: dict[str, Any]) -> bytes:
    """Tensors and plain values as they are now, for `write`."""
    # In memory: torch.save to a file reports a full disk only as an unexpected position.
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def write(path: Path, content: bytes) -> None:
    """Write a file; it is on disk when this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # another node could not flush this node's writes


@contextlib.contextmanager
def reading(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of what `serialise` returns; the block parses its content.

    Raises:
        CheckpointError: the file is missing, damaged or cannot be read, or the block raised an
            error on its content; names the file.
    """
    try:
        with open_file(path) as file:
            content = load_data(file)
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, not a dictionary")
        yield content
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except CheckpointError:
        raise
    except torch.OutOfMemoryError:
        raise
    except (
        *(pickle.UnpicklingError, EOFError, OSError, RuntimeError),
        *(AttributeError, LookupError, TypeError, ValueError, OverflowError),
    ) as error:
        reason = f"{type(error).__name__}: {explain(error)}"
        raise CheckpointError(f"{path} is damaged: {reason}") from None


def column(value: Any, dtype: torch.dtype, *, length: int | None = None) -> torch.Tensor:
    """The value, if it is a one-dimensional tensor of this dtype and length, of valid numbers.

    Valid are finite floats (log-probs, advantages) and integers from 0 (tokens, counts, versions).

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, torch.Tensor) or (value.dtype, value.ndim) != (dtype, 1):
        raise ValueError(f"{value!r:.40} instead of a column of {dtype}")
    if not value.is_contiguous():  # of any length, without elements of its own
        raise ValueError(f"a column with the stride {value.stride()}")
    if length is not None and len(value) != length:
        raise ValueError(f"{len(value)} elements instead of {length}")
    if not (value.isfinite() if value.is_floating_point() else value >= 0).all():
        raise ValueError("numbers that are not finite, or below 0")
    return value


def matrix(value: Any, *dtypes: torch.dtype) -> torch.Tensor:
    """The value, if it is a two-dimensional tensor of one of these dtypes.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, torch.Tensor) or value.dtype not in dtypes or value.ndim != 2:
        raise ValueError(f"{value!r:.40} instead of a matrix of {dtypes[0]}")
    if not value.is_contiguous():
        raise ValueError(f"a matrix with the strides {value.stride()}")
    return value


def plain(value: Any, *kinds: type) -> Any:
    """The value, if its type is one of these; subclasses are refused.

    Raises:
        ValueError: it is not.
    """
    if type(value) not in kinds:
        raise ValueError(f"{value!r:.40} instead of {kinds[0].__name__}")
    return value


def numbers(value: Any) -> dict[str, float]:
    """The value, if it is a dictionary of names and numbers.

    Raises:
        ValueError: it is not.
    """
    return {plain(name, str): plain(one, float, int) for name, one in plain(value, dict).items()}
