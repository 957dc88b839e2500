"""Find the checkpoint in a Megatron folder, and what the folder records of its model.

- Our conversion: OUT/release/, named by OUT/latest_checkpointed_iteration.txt; model in OUT/hf/.
- Our runs: RUN/checkpoints/step_00000040/; model in its manifest.json.
- Megatron-LM: DIR/iter_0000100/, named by the same text file; model in common.pt's `args`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import Metadata

from gapo_megatron.errors import CheckpointError, ConfigError, ConversionError
from gapo_megatron.formats.manifest import (
    MANIFEST_NAME,
    Manifest,
    is_plain_name,
    list_steps,
    read_manifest,
)
from gapo_megatron.formats.unpickle import read_common, read_metadata
from gapo_megatron.io.documents import read_json, read_object, read_text

TRACKER = "latest_checkpointed_iteration.txt"
Record = Mapping[str, Any] | argparse.Namespace
"""Fields of config.json by name, or Megatron-LM's arguments."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in a Megatron folder, and what it records of its model."""

    root: Path
    """The folder with `.metadata`."""
    hf_dir: Path | None
    """Hugging Face folder of its model, perhaps without weights; None if unknown."""
    records: dict[Path, Record]
    """What each file records of the model: fields of config.json, or Megatron-LM's arguments."""
    metadata: Metadata
    """The `.metadata` that describes its tensors."""
    manifest: Manifest | None
    """Digests of every file; None unless a run of ours wrote the checkpoint."""


def find_megatron(path: str | Path) -> Found:
    """Find the checkpoint in a folder; reads no tensor.

    Args:
        path: a checkpoint, a folder with latest_checkpointed_iteration.txt, or a run of ours (its
            newest checkpoint).

    Raises:
        ConfigError: there is no complete checkpoint of the format torch_dist.
        ConversionError: .metadata, common.pt or a JSON file is damaged, or would run code.
    """
    root = _find(Path(path))
    try:
        backend = read_json(root / "metadata.json", error=ConversionError)["sharded_backend"]
    except FileNotFoundError:
        raise ConfigError(
            f"Megatron folder {root} is incomplete: metadata.json, written last, is missing"
        ) from None
    except (KeyError, TypeError):
        raise ConfigError(f"{root / 'metadata.json'} is not megatron-core's") from None
    if backend != "torch_dist":
        raise ConfigError(f"Megatron folder {root} has the format {backend!r}, not 'torch_dist'")
    if not (root / ".metadata").exists():
        raise ConfigError(f"Megatron folder {root} is incomplete: .metadata is missing")
    manifest, metadata = _read_manifest(root), read_metadata(root)
    records = _read_records(root, metadata, manifest)
    return Found(root, _hf_dir_of(root, manifest), records, metadata, manifest)


def _find(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"Megatron folder {path} does not exist")
    if (path / ".metadata").exists() or (path / "metadata.json").exists():
        return path
    if (path / TRACKER).exists():
        name = read_text(path / TRACKER, max_bytes=256).strip()
        name = f"iter_{int(name):07d}" if name.isdecimal() else name
        if not is_plain_name(name) or not (path / name).is_dir():
            raise ConfigError(f"{path / TRACKER} names the folder {name!r}, which does not exist")
        return path / name
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    try:
        steps = list_steps(folder)
    except CheckpointError as error:
        raise ConversionError(str(error)) from None
    if steps:
        return steps[0]
    raise ConfigError(
        f"Megatron folder {path} holds no checkpoint: no .metadata, no {TRACKER}, no step_*"
    )


def _hf_dir_of(root: Path, manifest: Manifest | None) -> Path | None:
    beside = root.parent / "hf"
    if (beside / "config.json").is_file():
        return beside
    named = ((manifest and manifest.config.get("model")) or {}).get("hf_dir")
    is_there = isinstance(named, str) and os.path.isfile(os.path.join(named, "config.json"))
    return Path(named) if named and is_there else None


def _read_records(root: Path, metadata: Metadata, manifest: Manifest | None) -> dict[Path, Record]:
    common, beside = root / "common.pt", root.parent / "hf" / "config.json"
    args = read_common(root, metadata).get("args")
    records: dict[Path, Record] = {}
    if isinstance(args, argparse.Namespace):
        records[common] = args
    if manifest:
        records[root / MANIFEST_NAME] = manifest.model
    if beside.exists():
        records[beside] = read_object(beside, error=ConversionError)
    return records


def _read_manifest(root: Path) -> Manifest | None:
    if not os.path.lexists(root / MANIFEST_NAME):
        return None
    try:
        return read_manifest(root)
    except CheckpointError as error:
        raise ConversionError(str(error)) from None
