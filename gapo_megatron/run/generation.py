"""Where the rollouts of a run come from: its own ranks in turns, or ranks that only generate.

`run/colocated.py` is the first, `run/generation_ranks.py` the second; the loop does not know which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gapo_megatron.config import Config
from gapo_megatron.facts import Facts
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.types import Batch, OpenGroup, Sequences


@dataclass(frozen=True, slots=True)
class Collected:
    """Rollouts that a step learns from; the same on every rank of the trainer."""

    facts: Facts
    """All sequences; `Generation.bring_tokens` brings this rank's share of their tokens."""
    metrics: dict[str, float]
    """Metrics of the rollouts."""


class Generation(Protocol):
    """What a run needs of its engines. Every method is collective over the trainer's ranks.

    One step calls `collect`, `carry`, `bring_tokens` and `sync`, in this order; `evaluate` comes
    between steps. What takes long counts into the run's stopwatch, and may be broken off by a stop.
    """

    @property
    def source_state(self) -> Mapping[str, Any]:
        """Place in the data after the last batch that was collected."""

    @property
    def samples_ahead(self) -> bool:
        """Whether the next batch may be there before the weights have moved."""

    @property
    def stages(self) -> Sequence[str]:
        """Stages of the stopwatch that `collect` and `carry` take."""

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Metrics of the held-out problems at the weights of `step`; None: broken off."""

    def collect(self, step: int) -> Collected | None:
        """The batch of `step`, judged; None: a stop broke it off, and its prompts come again.

        The trainer has its memory afterwards.
        """

    def carry(self, step: int) -> None:
        """Keep the old log-probs of what was sampled and is still open (`learn.carry`)."""

    def bring_tokens(self, batch: Batch) -> Batch:
        """Bring this rank's share of the tokens of the batch that was collected last."""

    def sync(self, probe: Sequences, *, policy_version: int) -> WeightCheck | None:
        """Send the policy's weights to the engines, proved by log-probs; None: not due yet.

        Raises:
            WeightSyncError: an engine does not compute what the policy computes.
        """

    def resume(self, open_groups: Sequence[OpenGroup]) -> None:
        """Go on with groups of a checkpoint at the next `collect`; all tokens on every rank."""

    def gather_open_groups(self) -> Sequence[OpenGroup]:
        """Groups with unfinished responses, for a checkpoint: with all tokens, on rank 0 alone."""

    def sample_ahead(self) -> None:
        """Have further batches sampled meanwhile, where that is allowed. Never waits."""

    def has_batch(self, step: int) -> bool:
        """Whether the batch of `step` is there, sampled ahead: `collect` does not wait for it."""

    def give_up(self) -> int:
        """Break off what is sampled ahead, for a stop; the tokens that this gives back."""

    def leave_memory(self) -> None:
        """Leave the devices' memory to the policy. Nothing happens where it has it already."""

    def close(self) -> None:
        """End what runs beside this process. Called once, when nothing is left to do."""


def evaluation_path(config: Config, step: int) -> Path:
    """File of an evaluation's counts by problem."""
    return Path(config.run.output_dir) / "evaluations" / f"step_{step}.json"
