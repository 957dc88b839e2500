"""When to save a run, and the export of its final model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from gapo_megatron import checkpoint
from gapo_megatron.checkpoint import Room, Saving, State
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.exchange import Channel
from gapo_megatron.formats.manifest import earliest_resume
from gapo_megatron.formats.weights import write_hf
from gapo_megatron.io.run_folder import checkpoints_dir, mark_finished
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.journal import remove_journals
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.generation import Generation


@dataclass
class Checkpoints:
    """Saves a run when that is due, and remembers the last saved state."""

    config: Config
    policy: Policy
    generation: Generation
    """Generation whose open groups are saved."""
    channel: Channel
    """All ranks of the trainer: rank 0 gathers the tokens of an open step."""
    attempt: Attempt
    """A checkpoint is written only while this attempt owns the run."""
    stopwatch: Stopwatch
    """Times the stage `checkpoint`: while training waits for a save."""
    _saved: tuple[int, int | None] | None = None
    """Step, and updates of an open step, at the last save or load."""
    _writing: Saving | None = None
    """The checkpoint that is written while training continues; the same on every rank."""
    _room: Room | None = None
    """With `checkpoint.background`: host memory that is kept from save to save."""

    def __post_init__(self) -> None:
        if self.config.checkpoint.background:
            self._room = Room()

    def note_resumed(self, state: State) -> None:
        """Remember the state that the run was resumed from."""
        self._saved = (state.step, state.num_open_updates)

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step` steps."""
        return step == self.config.run.num_steps or self.config.checkpoint.is_due(step)

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages that a stop still has to wait for: a save, after the one under way, if any."""
        return ("checkpoint",) * (1 if self._writing is None else 2)

    def save_if_moved(self, state: State) -> None:
        """Save and wait, unless nothing has changed since the last save or load. Collective."""
        self._finish()
        if self._saved != (state.step, state.num_open_updates):
            self.save(state, wait=True)

    def save(self, state: State, *, wait: bool = False) -> None:
        """Write a checkpoint: with `checkpoint.background` while training continues.

        If generation ranks are lost, a job that can be requeued is then asked to stop.

        Args:
            state: state of the run.
            wait: return when the checkpoint is whole. The last one always is then, and the first
                one of a run: until one is whole, the check of the time limit does not know how long
                a save takes.

        Collectives: those of `checkpoint.begin_save` and `Saving.finish`; messages with tokens from
        all ranks to rank 0; a broadcast with `checkpoint.background`.

        Raises:
            CheckpointError, FencedError: see `checkpoint.begin_save` and `Saving.finish`.
        """
        self._finish()
        is_last = wait or state.step == self.config.run.num_steps
        with self.stopwatch("checkpoint", is_part=True):
            open_step = state.open_step
            whole = replace(
                state,
                open_step=open_step and open_step.gathered(self.channel),
                open_groups=self.generation.gather_open_groups(),
                open_groups_before=self.generation.gather_open_groups(before_batch=True)
                if state.is_ahead
                else (),
            )
            self._writing = checkpoint.begin_save(
                self.config.run.output_dir,
                whole,
                policy=self.policy,
                config=self.config,
                attempt=self.attempt,
                in_background=not is_last and self._may_continue(),
                room=None if is_last else self._room,
            )
        self._saved = (state.step, state.num_open_updates)
        if not self._writing.in_background:
            self._finish()
        if (num_lost := self.generation.num_lost) and self.attempt.requeues and not is_last:
            self.attempt.ask_to_stop(f"{num_lost} generation ranks are lost; a new start has all")

    def _may_continue(self) -> bool:
        """Whether training may continue while a state is written. Collective: see `save`."""
        # A rank may have failed to read the times of an earlier attempt.
        return self.config.checkpoint.background and self.attempt.agree(
            "checkpoint" in self.stopwatch.recent
        )

    def finish_if_written(self) -> None:
        """Publish the checkpoint under way, if every rank has written its files.

        Collectives, only with a checkpoint under way: those of `Saving.is_written` and `finish`.

        Raises:
            CheckpointError, FencedError: see `Saving.finish`.
        """
        if self._writing is not None and self._writing.is_written():
            self._finish()

    def _finish(self) -> None:
        """Wait until the checkpoint under way, if any, is whole; keep the times of stages.

        Those are for the next attempt.
        """
        if self._writing is None:
            return
        saving, self._writing = self._writing, None
        with self.stopwatch("checkpoint", is_part=True):
            saving.finish()
            if self.attempt.leads:
                self._remove_journals(saving.document.step)
        self.stopwatch.remember("checkpoint", saving.work_s)
        self.stopwatch.notes["perf/checkpoint_whole_s"] = saving.whole_s
        self.attempt.keep_stage_seconds(self.stopwatch.recent)

    def _remove_journals(self, step: int) -> None:
        """Remove those of steps that no resume repeats, should newer checkpoints be damaged."""
        run_dir = Path(self.config.run.output_dir)
        oldest = earliest_resume(checkpoints_dir(run_dir), self.config.checkpoint)
        remove_journals(run_dir, before=step if oldest is None else min(step, oldest))


def export(
    config: Config, policy: Policy, attempt: Attempt, *, end_tokens: Collection[int]
) -> None:
    """Write the trained model in Hugging Face's format, and mark the run as finished.

    `end_tokens`: ids at which responses ended in training; see `carry_over`.

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
        end_tokens=end_tokens,
        write=is_first,
    )
    if is_first:
        mark_finished(run_dir, num_steps=config.run.num_steps)
