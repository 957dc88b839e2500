"""SHA-256 of files, and of parts of this package."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gapo_megatron.errors import DataError

_PACKAGE = Path(__file__).parents[1]


def file_sha256(path: Path) -> str:
    """Digest of a file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def code_sha256(*parts: str) -> str:
    """Digest of modules of this package, so that results of different versions are not mixed.

    Args:
        parts: files (`data/benchmarks.py`) and folders (`rewards`, with all files in them).
    """
    roots = [_PACKAGE / part for part in parts]
    assert all(root.exists() for root in roots), f"{parts} are not all here"
    digest = hashlib.sha256()
    for path in sorted(
        p for root in roots for p in ([root] if root.suffix else root.rglob("*.py"))
    ):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
