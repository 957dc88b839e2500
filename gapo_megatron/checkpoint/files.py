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
