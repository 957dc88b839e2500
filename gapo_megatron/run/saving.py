"""When a run is saved, and the model that it leaves at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import LoadedState
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.exchange import Channel
from gapo_megatron.hf.manifest import Branch
from gapo_megatron.hf.weights import write_hf
from gapo_megatron.io.run_folder import has_finished, mark_finished
from gapo_megatron.policy import Policy
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.generation import Generation
from gapo_megatron.run.position import Position


@dataclass
class Checkpoints:
    """Saves a run where that is due, and knows where it was saved last.

    A run that is only timed (`keep_weights` False) is asked to save like any other, and writes
    nothing.
    """

    config: Config
    policy: Policy
    generation: Generation
    """Generation whose open groups are saved."""
    channel: Channel
    """All ranks of the trainer: rank 0 gathers the tokens of an open step."""
    attempt: Attempt
    """Saves only while it owns the run."""
    stopwatch: Stopwatch
    """Counts the stage `checkpoint`."""
    keep_weights: bool = True
    _branch: Branch | None = None
    _saved: tuple[int, int | None] | None = None
    """Step and updates of the open step where the run was saved or loaded last."""

    def note_resumed(self, resumed: LoadedState) -> None:
        """Take note of the checkpoint that the run was resumed from."""
        self._branch = resumed.branch
        num_open_updates = resumed.num_open_updates if resumed.ahead is None else 0
        self._saved = (resumed.step, num_open_updates)

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step` steps."""
        return step == self.config.run.num_steps or self.config.checkpoint.is_due(step)

    def save_if_due(self, position: Position) -> None:
        """Save after a finished step, where that is due. Collective."""
        if self.is_due(position.step):
            self.save(position)

    def save_if_moved(self, position: Position) -> None:
        """Save, unless the run is where it was saved or loaded last. Collective."""
        if self._saved != (position.step, position.num_open_updates):
            self.save(position)

    def save(self, position: Position) -> None:
        """Write a checkpoint, and what stages take for the next attempt.

        Collectives: those of `checkpoint.save`.

        Raises:
            CheckpointError, FencedError: as of `checkpoint.save`.
        """
        if not self.keep_weights:
            return
        with self.stopwatch("checkpoint"):
            open_step, source_state, ahead = position.open_step, position.source_state, None
            if open_step is not None:
                open_step = open_step.gathered(self.channel)
            if open_step and not open_step.progress.num_updates and self.generation.samples_ahead:
                # Between two steps: the batch of the next one is there already.
                ahead = checkpoint.Ahead(open_step, source_state)
                open_step, source_state = None, position.source_before
            trainer_state: dict[str, Any] = {
                "source": source_state,
                "window": position.window.state_dict(),
            }
            if position.num_given_back:
                trainer_state["given_back"] = position.num_given_back
            state = checkpoint.State(
                step=position.step,
                trainer_state=trainer_state,
                branch=self._branch,
                open_step=open_step,
                ahead=ahead,
                open_groups=self.generation.gather_open_groups(),
            )
            checkpoint.save(
                self.config.run.output_dir,
                state,
                policy=self.policy,
                config=self.config,
                attempt=self.attempt,
            )
        self.attempt.keep_stage_seconds(self.stopwatch.recent)
        self._saved = (position.step, position.num_open_updates)


def export(config: Config, policy: Policy, attempt: Attempt) -> None:
    """Write the trained model in Hugging Face's format, and mark the run as finished.

    Collectives: those of `Policy.iterate_hf_weights`.

    Raises:
        FencedError: on rank 0, when a newer attempt has taken the run.
    """
    run_dir, is_first = Path(config.run.output_dir), policy.groups.rank == 0
    if is_first:
        attempt.require_ownership()
    write_hf(
        policy.iterate_hf_weights(),
        source_dir=config.model.hf_dir,
        output_dir=run_dir / "hf",
        made_by="train",
        or_unmarked=has_finished(run_dir),  # by a version that did not mark it
        write=is_first,
    )
    if is_first:
        mark_finished(run_dir, num_steps=config.run.num_steps)
