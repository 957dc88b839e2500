"""Shapes of the models in configs/, for a plan or a dry run before the model is downloaded.

NAME.json in this folder has the fields of a published config.json that determine shapes and
computation, without tokenizer and dtype. NAME is the last part of `model.hf_dir`; its origin is in
`Architecture.published`. Training never reads these files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapo_megatron.io.documents import read_object
from gapo_megatron.models.config_json import ModelFacts, facts_of, read_model_facts
from gapo_megatron.models.tables import ARCHITECTURES

_HERE = Path(__file__).parent


def shipped_names() -> list[str]:
    """Names of the models whose shapes are shipped."""
    return sorted(_origins())


def _origins() -> dict[str, str]:
    """NAME -> origin."""
    return {
        name: origin for one in ARCHITECTURES.values() for name, origin in one.published.items()
    }


def shipped_fields(name: str) -> dict[str, Any]:
    """The shipped fields of a model's config.json."""
    return read_object(_HERE / f"{name}.json")


def find_model(hf_dir: str) -> tuple[ModelFacts | None, str]:
    """The shapes of the model of `model.hf_dir`, for plans and dry runs.

    Returns:
        The folder's config.json and ""; or, if there is no such folder, the shipped shapes of that
        name and a note that says so; or None and "" if there are none.

    Raises:
        ConfigError: the folder exists, but its config.json is missing or cannot be used.
    """
    folder = Path(hf_dir)
    if folder.is_dir():
        return read_model_facts(hf_dir), ""
    if folder.name not in shipped_names():
        return None, ""
    note = (
        f"Model: no folder {hf_dir} here; using the shapes of {_origins()[folder.name]} "
        f"from gapo_megatron/models/published/{folder.name}.json. Training needs the folder."
    )
    return facts_of(shipped_fields(folder.name), source=f"{folder.name}.json"), note
