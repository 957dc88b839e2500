"""When to save a run, and the export of its final model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import State
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.exchange import Channel
from gapo_megatron.hf.manifest import earliest_resume
from gapo_megatron.hf.weights import write_hf
from gapo_megatron.io.run_folder import checkpoints_dir, has_finished, mark_finished
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.journal import remove_journals
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.generation import Generation


@dataclass
class Checkpoints:
    """Saves a run when that is due, and remembers the last saved state.

    Writes nothing for a run that is only timed (`keep_weights` False).
    """

    config: Config
    policy: Policy
    generation: Generation
    """Generation whose open groups are saved."""
    channel: Channel
    """All ranks of the trainer: rank 0 gathers the tokens of an open step."""
    attempt: Attempt
    """A checkpoint is written only while this attempt owns the run."""
    stopwatch: Stopwatch
    """Times the stage `checkpoint`."""
    keep_weights: bool = True
    _saved: tuple[int, int | None] | None = None
    """Step, and updates of an open step, at the last save or load."""

    def note_resumed(self, state: State) -> None:
        """Remember the state that the run was resumed from."""
        self._saved = (state.step, state.num_open_updates)

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step` steps."""
        return step == self.config.run.num_steps or self.config.checkpoint.is_due(step)

    def save_if_moved(self, state: State) -> None:
        """Save, unless nothing has changed since the last save or load. Collective."""
        if self._saved != (state.step, state.num_open_updates):
            self.save(state)

    def save(self, state: State) -> None:
        """Write a checkpoint, and the times of stages for the next attempt.

        Collectives: those of `checkpoint.save`; messages with tokens from all ranks to rank 0.

        Raises:
            CheckpointError, FencedError: see `checkpoint.save`.
        """
        if not self.keep_weights:
            return
        with self.stopwatch("checkpoint"):
            open_step = state.open_step
            whole = replace(
                state,
                open_step=open_step and open_step.gathered(self.channel),
                open_groups=self.generation.gather_open_groups(),
            )
            checkpoint.save(
                self.config.run.output_dir,
                whole,
                policy=self.policy,
                config=self.config,
                attempt=self.attempt,
            )
            if self.attempt.leads:
                self._remove_journals(state.step)
        self.attempt.keep_stage_seconds(self.stopwatch.recent)
        self._saved = (state.step, state.num_open_updates)

    def _remove_journals(self, step: int) -> None:
        """Remove those of steps that no resume repeats, should newer checkpoints be damaged."""
        run_dir = Path(self.config.run.output_dir)
        oldest = earliest_resume(checkpoints_dir(run_dir), self.config.checkpoint)
        remove_journals(run_dir, before=step if oldest is None else min(step, oldest))


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
        or_unmarked=has_finished(run_dir),  # written by a version without markers
        write=is_first,
    )
    if is_first:
        mark_finished(run_dir, num_steps=config.run.num_steps)
