"""Shapes of the models that configs/ names, for a plan or a dry run before the model is there.

NAME.json beside this file has what config.json of a published model says of shapes and of what is
computed; nothing of its tokenizer or dtype. NAME is the last part of `model.hf_dir`; the file of
its architecture says where it comes from (`Architecture.published`).

Training never reads them: it needs the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapo_megatron.io.documents import read_object
from gapo_megatron.models.config_json import ModelFacts, facts_of, read_model_facts
from gapo_megatron.models.tables import ARCHITECTURES

_HERE = Path(__file__).parent


def shipped_names() -> list[str]:
    """Models whose shapes are here."""
    return sorted(_origins())


def _origins() -> dict[str, str]:
    """NAME -> where it comes from."""
    return {
        name: origin for one in ARCHITECTURES.values() for name, origin in one.published.items()
    }


def shipped_fields(name: str) -> dict[str, Any]:
    """Fields of config.json of a model whose shapes are in this folder."""
    return read_object(_HERE / f"{name}.json")


def find_model(hf_dir: str) -> tuple[ModelFacts | None, str]:
    """The model of `model.hf_dir`, for arithmetic alone.

    Returns:
        What config.json of the folder says, and ""; where there is no such folder, the shapes that
        are here under its name, and a sentence that says so; None and "" where there are none.

    Raises:
        ConfigError: the folder is there, and its config.json is not or cannot be used.
    """
    folder = Path(hf_dir)
    if folder.is_dir():
        return read_model_facts(hf_dir), ""
    if folder.name not in shipped_names():
        return None, ""
    note = (
        f"Model: no folder {hf_dir} here; its shapes are those of {_origins()[folder.name]}, "
        f"shipped as gapo_megatron/models/published/{folder.name}.json. Training needs the folder."
    )
    return facts_of(shipped_fields(folder.name), source=f"{folder.name}.json"), note
