"""A clone as git has it, for commands and configs whose paths are relative."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


ROOMS = ("benchmarks", "configs", "docs", "gapo_megatron", "gapo_tools", "studies", "tools")


def make_clone(folder: Path) -> Path:
    """Link to the files of a clone, and to nothing that a user has there: runs, models, data."""
    for name in ROOMS:
        (folder / name).symlink_to(ROOT / name)
    return folder
