"""The loop's own state in a checkpoint: its place in the data, and what metrics look back on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from gapo_megatron.errors import CheckpointError
from gapo_megatron.hf.manifest import first_flaw
from gapo_megatron.io.documents import read_json

TRAINER_STATE_NAME = "trainer_state.json"

_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True, slots=True)
class _Source:
    """`data.source.PromptSource.state_dict`."""

    epoch: _Count
    remaining: list[_Count]
    dataset: str


@dataclass(frozen=True, slots=True)
class _TrainerState:
    source: _Source
    window: list[list[tuple[Annotated[float, Field(ge=0, lt=2**31)], float, float, float]]]
    """`objective.diagnostics.CorrelationWindow.state_dict`."""
    step: _Count | None = None
    """Steps finished; not in files that older versions wrote."""
    given_back: _Count = 0
    """Tokens that were sampled ahead and given back, where the next step is to count them."""


_SHAPE = TypeAdapter(_TrainerState)


_SOURCE = TypeAdapter(_Source)


def check_source(state: Mapping[str, Any]) -> None:
    """Refuse what is no state of a `PromptSource`.

    Raises:
        ValueError: says what is amiss.
    """
    try:
        _SOURCE.validate_json(json.dumps(state), strict=True)
    except ValidationError as error:
        raise ValueError(first_flaw(error)) from None


def write_trainer_state(folder: Path, state: Mapping[str, Any], *, step: int) -> None:
    """Write what `read_trainer_state` reads; rank 0 alone."""
    text = json.dumps({**state, "step": step}, allow_nan=False)
    assert json.loads(text) == {**state, "step": step}, f"not plain JSON values: {state}"
    (folder / TRAINER_STATE_NAME).write_text(text, encoding="utf-8")


def read_trainer_state(folder: Path, *, step: int) -> dict[str, Any]:
    """The state as it was given to `write_trainer_state`.

    Args:
        folder: the checkpoint's folder.
        step: the step in the checkpoint's manifest.

    Raises:
        CheckpointError: the file is missing, damaged or misshapen, or is of another step.
    """
    path = folder / TRAINER_STATE_NAME
    try:
        state = read_json(path, error=CheckpointError)
        found = _SHAPE.validate_json(json.dumps(state), strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_flaw(error)}") from None
    if found.step not in (None, step):
        raise CheckpointError(f"{path} is of step {found.step}, and the manifest of step {step}")
    return {name: state[name] for name in ("source", "window", "given_back") if name in state}
