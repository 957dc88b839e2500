"""State of a run: content of a checkpoint beside weights, optimizer and random generators."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gapo_megatron.checkpoint import files
from gapo_megatron.checkpoint.open_groups import from_content, serialised_groups, to_content
from gapo_megatron.checkpoint.open_step import OpenStep
from gapo_megatron.errors import CheckpointError, said
from gapo_megatron.formats.manifest import MANIFEST_NAME, Branch, Manifest, find_damage
from gapo_megatron.io.documents import read_json
from gapo_megatron.objective.answers import AnswerForms
from gapo_megatron.objective.diagnostics import CorrelationWindow
from gapo_megatron.rollouts import Batch
from gapo_megatron.types import Episode

TRAINER_STATE_NAME = "trainer_state.json"
AHEAD_NAME = "ahead.pt"
"""File of the next step's batch, sampled ahead: the weights that sampled it no longer exist, so a
checkpoint between two steps must hold it."""


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
            CheckpointError: the file is missing or damaged; names it.
        """
        with files.reading(folder / AHEAD_NAME) as shared:
            self.open_step = replace(OpenStep.from_shared(shared), is_ahead=True)
            self.source = json.loads(shared["source"])
            self.open_groups = from_content(shared["groups"])

    @classmethod
    def load_whole(cls, folder: Path, found: Manifest) -> State:
        """Check the digest of `TRAINER_STATE_NAME`, and read it. No collective.

        Raises:
            CheckpointError: see `load`.
        """
        entries = {name: one for name, one in found.files.items() if name == TRAINER_STATE_NAME}
        if not entries:
            raise CheckpointError(f"{folder / MANIFEST_NAME} does not list {TRAINER_STATE_NAME}")
        if damage := find_damage(folder, entries):
            raise CheckpointError(damage)
        return cls.load(folder, step=found.step)

    @classmethod
    def load(cls, folder: Path, *, step: int) -> State:
        """Read `TRAINER_STATE_NAME` into the state of a run between two steps. No collective.

        Args:
            folder: the checkpoint's folder.
            step: the step in the checkpoint's manifest.

        Raises:
            CheckpointError: the file is missing or damaged, or belongs to another step.
        """
        path = folder / TRAINER_STATE_NAME
        try:
            document = read_json(path, error=CheckpointError)
            found = document["step"]
            source, given_back = document["source"], document["given_back"]
            state = cls(found, source, source, num_given_back=given_back)
            state.window.load_state_dict(document["window"])
            state.answer_forms.load_state_dict(document["answer_forms"])
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {said(error)}") from None
        if found != step:
            raise CheckpointError(
                f"{path} belongs to step {found}, and the manifest to step {step}"
            )
        return state
