"""Run state that a checkpoint holds beside weights, optimizer and random generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapo_megatron.checkpoint.ahead import Ahead
from gapo_megatron.checkpoint.open_step import OpenStep
from gapo_megatron.hf.manifest import Branch
from gapo_megatron.types import OpenGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Position of a run: finished steps, the loop's own state, open step and open groups."""

    step: int
    """Steps finished, which is the index of the next one."""
    trainer_state: Mapping[str, Any]
    """The loop's own state (`trainer_state`): plain JSON values, the same on every rank."""
    branch: Branch | None = None
    """The run and checkpoint that this run branched from; None for a run that began by itself. All
    checkpoints of a branched run record it."""
    open_step: OpenStep | None = None
    """The step under way when a stop came; None between steps."""
    ahead: Ahead | None = None
    """The next step's batch, where it was sampled ahead; never beside an open step."""
    open_groups: Sequence[OpenGroup] = ()
    """Groups with unfinished responses, resumed by the next step; rank 0 alone saves them, and
    every rank loads them all."""

    @property
    def num_open_updates(self) -> int | None:
        """Updates that the open step has done; None between steps."""
        return None if self.open_step is None else self.open_step.progress.num_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState(State):
    """State that a resumed run continues from; the policy has been loaded already."""

    path: Path
    """The checkpoint's folder."""
    changes_objective: bool = False
    """Whether earlier steps had another objective: in a branch, or by the user's choice."""
