"""Interface of generation: colocated with the trainer, or on ranks that only generate.

`run/colocated.py` is the first, `run/generation_ranks.py` the second; the loop serves both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Episode


class Generation(Protocol):
    """Generation as the loop sees it. Every method is collective over the trainer's ranks.

    One step calls `collect`, `carry`, `bring_tokens`, `sync` and `sample_ahead`, in this order;
    `evaluate` comes between steps. Long work is timed by the run's stopwatch, and a stop may abort
    it.
    """

    @property
    def source_state(self) -> Mapping[str, Any]:
        """Data position after the last batch that was collected."""

    @property
    def samples_ahead(self) -> bool:
        """Whether the next batch may be sampled before the weights are updated."""

    @property
    def num_lost(self) -> int:
        """Generation ranks that have died in this attempt; the others go on."""

    @property
    def dp_ranks(self) -> DataParallelRanks:
        """Data-parallel rank of each of the trainer's ranks."""

    @property
    def stages(self) -> Sequence[str]:
        """Stages of the stopwatch that `collect` and `carry` run."""

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Metrics of the held-out problems at the weights of `step`; None: aborted by a stop."""

    def collect(self, step: int) -> Rollouts | None:
        """The judged rollouts of `step`; None: aborted by a stop, and the prompts are drawn again.

        Afterwards the device memory is the trainer's.
        """

    def carry(self, step: int) -> None:
        """Keep old log-probs of responses that are still unfinished (`learn.checks.carry`)."""

    def bring_tokens(self, batch: Batch) -> Batch:
        """Fetch this rank's share of the tokens of the planned batch that was collected last."""

    def sync(self, probe: Rollouts, *, policy_version: int) -> WeightCheck | None:
        """Send the policy's weights to the engines and verify log-probs; None: not due yet.

        Raises:
            WeightSyncError: an engine does not compute what the policy computes.
        """

    def gather_open_groups(self, *, before_batch: bool = False) -> Sequence[tuple[Episode, ...]]:
        """Groups with unfinished responses, for a checkpoint: with all tokens, on rank 0 alone.

        Those after the batch that was collected last; with `before_batch`, which only a batch that
        was sampled ahead needs, those before it.
        """

    def sample_ahead(self) -> None:
        """Order the next batches if `rollout.max_staleness` allows it. Never waits."""

    def has_batch(self, step: int) -> bool:
        """Whether the batch of `step` was sampled ahead: `collect` does not wait for it."""

    def discard_ahead(self) -> int:
        """Abort batches being sampled ahead, for a stop; returns the number of discarded tokens."""

    def leave_memory(self) -> None:
        """Release the engine's device memory to the policy, if the engine still holds any."""

    def close(self) -> None:
        """End worker processes and the generation side. Called once, at the end."""


def evaluation_path(run_dir: str, step: int) -> Path:
    """File of an evaluation's counts by problem."""
    return Path(run_dir) / "evaluations" / f"step_{step}.json"
