"""State of a run: content of a checkpoint beside weights, optimizer and random generators."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError

from gapo_megatron.checkpoint import files
from gapo_megatron.checkpoint.open_groups import from_content, serialised_groups, to_content
from gapo_megatron.checkpoint.open_step import OpenStep
from gapo_megatron.errors import CheckpointError
from gapo_megatron.formats.manifest import Branch, first_flaw
from gapo_megatron.io.documents import read_json
from gapo_megatron.objective.answers import AnswerForms
from gapo_megatron.objective.diagnostics import CorrelationWindow
from gapo_megatron.rollouts import Batch
from gapo_megatron.types import Episode

TRAINER_STATE_NAME = "trainer_state.json"
AHEAD_NAME = "ahead.pt"
"""File of the next step's batch, sampled ahead: the weights that sampled it no longer exist, so a
checkpoint between two steps must hold it."""

_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass
class State:
    """State of a run between two steps or within a step, from which the loop resumes.

    A step is open from the creation of its batch until it is logged. Before, a stop discards its
    rollouts; while it is open, a stop keeps rollouts and finished updates.
    """

    step: int = 0
    """Number of finished steps: the index of the current or next step."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Data position (`PromptSource.state_dict`): after the prompts of an open step, otherwise
    before those of the next step."""
    source_before: Mapping[str, Any] = field(default_factory=dict)
    """Data position before the prompts of the open or last step."""
    open_step: OpenStep | None = None
    """Batch of the open step and results so far; None between steps and while it samples. All
    tokens are on rank 0 for a save, on every rank after a load."""
    evaluated: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation before the open step; empty without an evaluation. Stored with the
    open step."""
    num_given_back: int = 0
    """Number of tokens sampled ahead and discarded while no step was open to count them."""
    window: CorrelationWindow = field(default_factory=CorrelationWindow)
    """Earlier steps for windowed metrics."""
    answer_forms: AnswerForms = field(default_factory=AnswerForms)
    """Forms of the correct answers of all earlier steps."""
    branch: Branch | None = None
    """Run and checkpoint that this run branched from; None without a branch. All checkpoints of a
    branched run record it."""
    open_groups: Sequence[tuple[Episode, ...]] = ()
    """Groups with unfinished responses, continued by the next step: after the batch of an open
    step. On rank 0 only for a save, on every rank after a load."""
    open_groups_before: Sequence[tuple[Episode, ...]] = ()
    """The same before the batch of an open step that was sampled ahead; for a save alone."""

    @property
    def is_ahead(self) -> bool:
        """Whether the open step's batch was sampled ahead, and has had no update yet."""
        step = self.open_step
        return step is not None and step.is_ahead and not step.progress.num_updates

    @property
    def num_open_updates(self) -> int | None:
        """Number of updates of the open step; None without an open step."""
        return None if self.open_step is None else self.open_step.progress.num_updates

    def open(self, batch: Batch, *, is_ahead: bool) -> None:
        """Open a step; `is_ahead`: older weights may have sampled its batch."""
        self.open_step = OpenStep(batch, dict(batch.metrics), self.evaluated, is_ahead=is_ahead)
        num_tokens, self.num_given_back = self.num_given_back, 0
        self.give_back(num_tokens)

    def give_back(self, num_tokens: int) -> None:
        """Count discarded tokens that were sampled ahead, in the open or the next step."""
        if self.open_step is None:
            self.num_given_back += num_tokens
        elif num_tokens:
            metrics, name = self.open_step.metrics, "rollout/given_back_tokens"
            metrics[name] = metrics.get(name, 0.0) + num_tokens

    def finish_step(self) -> None:
        """Proceed to the next step."""
        self.step, self.open_step, self.evaluated = self.step + 1, None, {}

    def serialised(self) -> dict[str, bytes]:
        """Content of the files of rank 0 by name, except of an open step not sampled ahead."""
        # A batch sampled ahead is a separate file; the checkpoint is otherwise one between steps.
        ahead = self.open_step if self.is_ahead else None
        document: dict[str, Any] = {
            "source": self.source_before if ahead else self.source,
            "window": self.window.state_dict(),
            "answer_forms": self.answer_forms.state_dict(),
            "step": self.step,
            "given_back": self.num_given_back,
        }
        text = json.dumps(document, allow_nan=False)
        assert json.loads(text) == document, f"not plain JSON values: {document}"
        content = {TRAINER_STATE_NAME: text.encode()}
        if ahead:
            after = {"source": json.dumps(self.source), "groups": to_content(self.open_groups)}
            content[AHEAD_NAME] = files.serialise(ahead.shared() | after)
        groups = self.open_groups_before if ahead else self.open_groups
        return content | serialised_groups(groups)

    def load_ahead(self, folder: Path) -> None:
        """Read a batch that was sampled ahead by any parallel layout, and the groups open after it.

        No collective.

        Raises:
            CheckpointError: the file is missing, damaged or misshapen; names it.
        """
        with files.reading(folder / AHEAD_NAME) as shared:
            source = json.loads(files.plain(shared["source"], str))
            try:
                _SOURCE.validate_json(json.dumps(source), strict=True)
            except ValidationError as error:
                raise ValueError(first_flaw(error)) from None
            self.open_step = replace(OpenStep.from_shared(shared), is_ahead=True)
            self.source = source
            self.open_groups = from_content(shared["groups"])

    @classmethod
    def load(cls, folder: Path, *, step: int) -> State:
        """Read `TRAINER_STATE_NAME` into the state of a run between two steps. No collective.

        Args:
            folder: the checkpoint's folder.
            step: the step in the checkpoint's manifest.

        Raises:
            CheckpointError: the file is missing, damaged or misshapen, or belongs to another step.
        """
        path = folder / TRAINER_STATE_NAME
        try:
            document = read_json(path, error=CheckpointError)
            found = _SHAPE.validate_json(json.dumps(document), strict=True)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except ValidationError as error:
            raise CheckpointError(f"{path}: {first_flaw(error)}") from None
        if found.step != step:
            raise CheckpointError(
                f"{path} belongs to step {found.step}, and the manifest to step {step}"
            )
        state = cls(step, document["source"], document["source"], num_given_back=found.given_back)
        state.window.load_state_dict(document["window"])
        state.answer_forms.load_state_dict(document["answer_forms"])
        return state


@dataclass(frozen=True, slots=True)
class _Source:
    """`data.source.PromptSource.state_dict`."""

    epoch: _Count
    remaining: list[_Count]
    dataset: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Order:
    """The position in one of several data sources."""

    epoch: _Count
    remaining: list[_Count]
    credit: float


@dataclass(frozen=True, slots=True)
class _Sources:
    """`data.source.PromptSource.state_dict` of several data sources."""

    sources: dict[str, _Order]
    dataset: dict[str, str]


_AnySource = Annotated[
    Annotated[_Source, Tag("source")] | Annotated[_Sources, Tag("sources")],
    Discriminator(lambda state: "sources" if "sources" in state else "source"),
]


@dataclass(frozen=True, slots=True)
class _Document:
    """The content of `TRAINER_STATE_NAME`."""

    source: _AnySource
    window: list[list[tuple[Annotated[float, Field(ge=0, lt=2**31)], float, float, float]]]
    """`objective.diagnostics.CorrelationWindow.state_dict`."""
    answer_forms: list[Annotated[int, Field(ge=-(2**63), lt=2**63)]]
    """`objective.answers.AnswerForms.state_dict`."""
    step: _Count
    """Number of finished steps."""
    given_back: _Count
    """`State.num_given_back`."""


_SHAPE = TypeAdapter(_Document)
_SOURCE: TypeAdapter[_Source | _Sources] = TypeAdapter(_AnySource)
