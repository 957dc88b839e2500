"""Checkpoints that somebody has changed, and signed again by hand; pickles that leave a trace."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from gapo_megatron.formats import manifest


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._trace),)


def sign(folder: Path) -> None:
    """Make the manifest that of the files as they are."""
    files = manifest.describe_files(folder, manifest.list_files(folder))
    manifest.write_manifest(folder, replace(manifest.read_manifest(folder), files=files))


def sign_document(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the manifest itself, whatever it becomes; returns its path."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    del document["sha256"]
    change(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))
    return path


def put(*keys: str | int, value: Any) -> Any:
    """Change of a document: sets the value at the keys; `...` removes it."""

    def change(document: Any) -> None:
        *path, last = keys
        for key in path:
            document = document[key]
        if value is ...:
            del document[last]
        else:
            document[last] = value

    return change


def trap_metadata(folder: Path, trace: Path) -> str:
    """All is there, and a trap where nobody looks; returns the name of the file."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Trap(trace)
    path.write_bytes(pickle.dumps(metadata))
    return path.name


def trap_common(folder: Path, trace: Path) -> str:
    torch.save({"num_updates": 0, "more": Trap(trace)}, folder / "common.pt")
    return "common.pt"


def trap_object(folder: Path, trace: Path) -> str:
    """In an object beside the tensors, such as Transformer Engine's modules have."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index, *_) = (
        index
        for index in metadata.storage_data
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
    )
    info = metadata.storage_data[index]
    stream = io.BytesIO()
    torch.save([Trap(trace)], stream)
    path = folder / info.relative_path
    metadata.storage_data[index] = replace(
        info, offset=path.stat().st_size, length=len(stream.getbuffer())
    )
    with path.open("ab") as file:
        file.write(stream.getbuffer())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder.name  # torch does not say which file


TRAPS = (trap_metadata, trap_common, trap_object)
