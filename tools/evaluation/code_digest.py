"""Digest of the code that made a result: another one does not go on with it."""

from __future__ import annotations

import hashlib
from pathlib import Path

_CODE = Path(__file__).parents[2]


def code_sha256(*parts: str) -> str:
    """Digest of modules, so that results of different versions are not mixed.

    Args:
        parts: files (`gapo_tools/evaluation/benchmarks.py`) and folders (`gapo_megatron/rewards`,
            with all files in them), from the folder of the package on.
    """
    roots = [_CODE / part for part in parts]
    assert all(root.exists() for root in roots), f"{parts} are not all here"
    digest = hashlib.sha256()
    for path in sorted(
        p for root in roots for p in ([root] if root.suffix else root.rglob("*.py"))
    ):
        digest.update(f"{path.relative_to(_CODE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
