"""A run from start to end: `Run` has the stages that the loop of `gapo_megatron.train` calls.

Importing this module takes seconds: it imports torch, transformers, Megatron-core and vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from gapo_megatron.checkpoint import State
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import VERIFIED_SEQUENCES, Config
from gapo_megatron.exchange import GroupChannel
from gapo_megatron.learn.checks import rounding
from gapo_megatron.learn.plan import plan_step, rounding_share
from gapo_megatron.learn.step import learn
from gapo_megatron.objective import make_batch
from gapo_megatron.objective.diagnostics import count_by_correct
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.sync import first_sequences
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.run import start
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.generation import Generation
from gapo_megatron.run.generation_side import GenerationSide
from gapo_megatron.run.inputs import Inputs, check_inputs
from gapo_megatron.run.memory import StepMemory
from gapo_megatron.run.metrics import MetricsWriter
from gapo_megatron.run.processes import process_age_s
from gapo_megatron.run.saving import Checkpoints, export
from gapo_megatron.run.tokens import TokenRecords

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """Ends the loop when a stop was asked for; `Run` then saves its state and ends the program."""


@dataclass
class Run:
    """A started run: the stages of a step, and the objects that they work on.

    A context manager. After the last step it exports the model; after a `Stopped` it saves its
    state. Any other error propagates: nothing is written, and no collective is called.
    """

    config: Config
    state: State
    """Position of the run: stored in a checkpoint beside the policy."""
    attempt: Attempt
    policy: Policy
    generation: Generation
    inputs: Inputs
    checkpoints: Checkpoints
    writer: MetricsWriter
    stopwatch: Stopwatch
    memory: StepMemory
    gloo_group: dist.ProcessGroup | None
    """Gloo group of all ranks of the trainer, for objects and tensors on the host."""
    tokens: TokenRecords
    _save_waits: bool = False
    """Whether a checkpoint is due that must contain the next batch."""
    _is_stopping: bool = False

    @classmethod
    def start(cls, config: Config) -> Run | GenerationSide | None:
        """Check, join the other ranks, build the model, resume a checkpoint, start the engine.

        Args:
            config: the run's settings; `early_checks.check_before_imports` has passed them.

        Returns:
            The run at the newest complete checkpoint of its folder, at the branch point, or at its
            first step. On a rank that only generates, a `GenerationSide`, which serves the trainer.
            None if the run is already finished: neither model nor engine is built.

        Collectives: those of the phases in `run.start`, in this order.

        Raises:
            GapoError: a user's mistake, found before any model is built.
        """
        startup = Stopwatch()
        startup.seconds["imports"] = process_age_s()
        inputs = check_inputs(config)
        world, attempt = start.join(config, inputs, startup)
        if start.is_finished_everywhere(config.run, world, attempt):
            num_steps, hf_dir = config.run.num_steps, Path(config.run.output_dir) / "hf"
            logger.info("all %d steps are done: %s", num_steps, hf_dir)
            attempt.end("finished")
            return None
        if world.bridge is not None and world.bridge.is_generation:
            return start.start_side(config, inputs, world, attempt, startup)
        start.begin_branch(config, inputs, attempt, startup)

        # The verifier workers start while the model is built.
        pool = None if world.bridge else start.start_pool(config)
        policy = start.build_policy(config, world, attempt, startup)
        resumed = start.resume(config, policy, inputs.source, attempt, startup)
        state = resumed or State()
        stopwatch = Stopwatch()
        stopwatch.recent = attempt.stage_seconds()
        trainer = start.Trainer(config, inputs, world, attempt, policy, state, stopwatch)
        generation = start.start_generation(trainer, pool, startup)
        stopwatch.lap(num_tokens=0)  # the time of steps counts from here
        writer = MetricsWriter(
            config.run.output_dir, config=config, resume_step=state.step, enabled=world.rank == 0
        )
        writer.log_startup(state.step, startup.seconds, sizes=start.sizes(world))
        channel = GroupChannel(world.gloo_group)
        checkpoints = Checkpoints(config, policy, generation, channel, attempt, stopwatch)
        if resumed is not None:
            checkpoints.note_resumed(resumed)
        return cls(
            config=config,
            state=state,
            attempt=attempt,
            policy=policy,
            generation=generation,
            inputs=inputs,
            checkpoints=checkpoints,
            writer=writer,
            stopwatch=stopwatch,
            memory=StepMemory(world.device),
            gloo_group=world.gloo_group,
            tokens=TokenRecords(config, inputs, generation, channel, writer),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the run, finished or stopped; other errors propagate. Collective."""
        if error is None:
            self._finish()
        elif isinstance(error, Stopped):
            self._stop()
        else:
            return False
        return True

    def steps(self) -> Iterator[int]:
        """Indices of the remaining steps; an interrupted step already has its batch.

        Collectives: a broadcast before each step and after the last.

        Raises:
            Stopped: a stop was asked for, or the job's time is too short for the next stage.
        """
        state, num_steps = self.state, self.config.run.num_steps
        if state.open_step is not None:
            if state.open_step.evaluated:
                self.writer.log(state.step, state.open_step.evaluated)
            self.generation.leave_memory()
        while state.step < num_steps:
            self._begin_step()
            yield state.step
        if state.step > num_steps:
            raise Stopped  # resumed beyond its last step: `num_steps` was larger when it was saved
        self._begin_step()  # for the last evaluation

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate the held-out problems before `step`, and log. Collective.

        Raises:
            Stopped: a stop was asked for.
        """
        if self.state.open_step is not None or not self._evaluation_is_due(step):
            return
        evaluated = self.generation.evaluate(step)
        if evaluated is None:
            raise Stopped
        self.writer.log(step, evaluated)
        self.state.evaluated = evaluated

    def collect(self, step: int) -> Rollouts | None:
        """Sample and judge the rollouts of a step; afterwards the device memory is the policy's.

        Groups that stay open for the next step get the log-probs of this step's weights.

        Returns:
            The same table on every rank; None if the step already has its batch.

        Collectives: those of `Generation.collect`, then of `Generation.carry`.

        Raises:
            Stopped: a stop was asked for; the prompts are drawn again.
        """
        if self.state.open_step is not None:
            return None
        rollouts = self.generation.collect(step)
        if rollouts is None:
            raise Stopped
        self.writer.log_samples(step, rollouts.samples, rollouts.timelines)
        self.state.source = self.generation.source_state
        self.memory.note("after_sleep")
        self.generation.carry(step)
        return rollouts

    def make_batch(self, rollouts: Rollouts | None) -> Batch:
        """Give every sequence its group's c and k and its advantage, and assign it to a rank.

        From here on the step is open: a checkpoint saves its batch.

        Args:
            rollouts: from `collect`; None if the step already has its batch.

        Returns:
            The step's batch, the same on every rank except for the tokens: each rank has its
            share.

        Collectives: those of `Generation.bring_tokens`.
        """
        state, config = self.state, self.config
        if rollouts is not None:
            batch = self._planned(make_batch(rollouts, config.objective.resolve()))
            num_rollouts = batch.rollouts_per_prompt
            metrics = rollouts.metrics | count_by_correct(batch, group_size=num_rollouts)
            batch = self.generation.bring_tokens(replace(batch, metrics=metrics))
            state.open(batch, is_ahead=self.generation.samples_ahead)
        assert state.open_step is not None, "a step without rollouts must have its batch"
        if state.open_step.batch.plan is None:  # from a checkpoint
            batch = self._planned(state.open_step.batch)
            state.open_step = replace(state.open_step, batch=batch)
        return state.open_step.batch

    def save_ahead_if_due(self) -> None:
        """Save the checkpoint that was due after the last step and must contain this step's batch.

        Only if batches are sampled ahead: the weights that sampled it no longer exist. Collective.
        """
        if self._save_waits and not self._is_stopping:
            self._save_waits = False
            self.checkpoints.save(self.state)

    def learn(self, batch: Batch) -> dict[str, float]:
        """Score old log-probs, then one update per mini-batch, without sequences with A = 0.

        Returns:
            Metrics of the updates, the same on every rank.

        Collectives: those of `learn.step.learn`.

        Raises:
            Stopped: a stop was asked for between two updates; those done are kept.
        """
        config, open_step = self.config, self.state.open_step
        assert open_step is not None and batch.plan is not None
        measures = any(map(any, batch.plan.rounding)) and rounding.is_due(
            self.state.step, self.policy, config.objective, config.rollout, config.metrics
        )
        stages = ("old_log_probs", "update", *("rounding",) * measures)
        learned = learn(
            self.policy,
            batch,
            config.objective,
            config.rollout,
            self.stopwatch,
            progress=open_step.progress,
            measures_rounding=measures,
            recorded=self.tokens.rows(batch, self.state.step),
            place=(config.run.seed, self.state.step),
            must_stop=lambda: self._is_stopping or self._must_stop(*stages),
        )
        if learned is None:
            raise Stopped
        self.memory.note("update_peak")
        return learned

    def sync(self, step: int, batch: Batch) -> WeightCheck | None:
        """Send the engines the new weights, and verify them with the batch's first sequences.

        Returns:
            Differences of log-probs; None if no weights are due after this step.

        Collectives: those of `Generation.sync`.

        Raises:
            WeightSyncError: an engine does not compute what the policy computes.
        """
        probe = first_sequences(batch, VERIFIED_SEQUENCES)
        check = self.generation.sync(probe, policy_version=step + 1)
        self.memory.note("after_wake")
        return check

    def sample_ahead(self, step: int) -> None:
        """Order the batches after `step` from ranks that only generate, unless they evaluate first.

        Never waits.
        """
        if not self._evaluation_is_due(step + 1):
            self.generation.sample_ahead()

    def log(
        self, step: int, batch: Batch, learned: dict[str, float], synced: WeightCheck | None
    ) -> None:
        """Write the step's metrics and timings; the step is finished.

        Its checkpoint follows: after a kill between the two the step is repeated and its line
        replaced.

        Collectives: those of `TokenRecords.log` and of `StepMemory.lap`.
        """
        open_step = self.state.open_step
        assert open_step is not None
        self.tokens.log(step, batch, open_step.progress)
        self.stopwatch.notes |= self.memory.lap(self.gloo_group)
        metrics = open_step.metrics | learned | self.state.window.add(learned)
        problems = self.inputs.source.problems
        references = {n: problems[n].answer for n in {*batch.table["problem"].tolist()}}
        metrics |= self.state.answer_forms.add(batch.table, references)
        if synced is not None:
            metrics |= synced.metrics(self.config.objective.resolve())
        num_tokens = int(batch.num_sampled_tokens.sum())
        self.writer.log(step, metrics, self.stopwatch.lap(num_tokens=num_tokens))
        self.state.finish_step()

    def save_if_due(self) -> None:
        """Save a finished step; if batches are sampled ahead, `save_ahead_if_due` does it later.

        Also publishes one written during the step. Collectives: those of `Checkpoints`.
        """
        self.checkpoints.finish_if_written()
        if self.checkpoints.is_due(step := self.state.step):
            self._save_waits = self.generation.samples_ahead and step < self.config.run.num_steps
            if not self._save_waits:
                self.checkpoints.save(self.state)

    def _finish(self) -> None:
        """Export the model and report the end to the launcher. Collective."""
        self.writer.close(is_finished=True)
        self.attempt.enter("export")
        self.generation.leave_memory()  # to load offloaded weights
        export(self.config, self.policy, self.attempt, end_tokens=self.inputs.turns.eos_token_ids)
        self.generation.close()
        self.attempt.end("finished")

    def _stop(self) -> None:
        """Save the state of the run, with an open step if any. Collective."""
        num_tokens = self.generation.discard_ahead()
        if self.generation.samples_ahead:  # otherwise the same samples are drawn again
            self.state.give_back(num_tokens)
        self.writer.close()
        self.checkpoints.save_if_moved(self.state)
        self.generation.close()
        self.attempt.end("stopped")

    def _begin_step(self) -> None:
        """Record the data position of the step, and stop if a stop was asked for. Collective.

        A batch that was sampled ahead is kept: the loop collects it, and `learn` then stops.

        Raises:
            Stopped: a stop was asked for, or the job's time is too short for the next stage.
        """
        state, step = self.state, self.state.step
        self.stopwatch.on_enter = lambda stage: self.attempt.enter(f"step {step}: {stage}")
        if state.open_step is not None:
            return
        state.source = state.source_before = self.generation.source_state
        evaluates = self._evaluation_is_due(step)
        stages = ["evaluate"] if evaluates else []
        if step < self.config.run.num_steps:
            stages += self.generation.stages
        self._is_stopping = self._must_stop(*stages)
        if self._is_stopping and (evaluates or not self.generation.has_batch(step)):
            raise Stopped

    def _evaluation_is_due(self, step: int) -> bool:
        every_steps, is_last = self.config.evaluation.every_steps, step == self.config.run.num_steps
        return bool(self.inputs.held_out) and (is_last or step % every_steps == 0)

    def _must_stop(self, *stages: str) -> bool:
        """Whether to stop: asked to, or too little time for `stages` and a save. Collective."""
        return self.attempt.must_stop(self.stopwatch.expect(*stages, *self.checkpoints.stages))

    def _planned(self, batch: Batch) -> Batch:
        """The batch with its packing plan."""
        with self.stopwatch("plan"):
            plan = plan_step(
                batch,
                self.config.batch,
                needs_every_sequence=self.config.objective.needs_every_sequence,
                data_parallel_size=self.policy.groups.dp_size,
                measured_share=rounding_share(self.config.model.precision),
            )
        return replace(batch, plan=plan)
