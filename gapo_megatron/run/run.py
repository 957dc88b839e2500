"""One run's life: `Run` is what the loop of `gapo_megatron.train` works on.

Torch, transformers, Megatron-core and vLLM come with this import.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import VERIFIED_SEQUENCES, Config
from gapo_megatron.exchange import GroupChannel
from gapo_megatron.learn import rounding
from gapo_megatron.learn.plan import plan_updates
from gapo_megatron.learn.step import learn
from gapo_megatron.objective import make_batch
from gapo_megatron.objective.diagnostics import count_by_correct
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.sync import first_sequences
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.run import start
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.generation import Collected, Generation
from gapo_megatron.run.generation_side import GenerationSide
from gapo_megatron.run.memory import StepMemory
from gapo_megatron.run.metrics import MetricsWriter
from gapo_megatron.run.position import Position
from gapo_megatron.run.processes import process_age_s
from gapo_megatron.run.saving import Checkpoints, export
from gapo_megatron.run.start import Inputs
from gapo_megatron.types import Batch

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """Ends the loop where a stop was asked for: `Run` saves where it is, and ends the program."""


@dataclass
class Run:
    """A started run: what the stages of a step work on, and what keeps the run going.

    A context manager. After the last step it exports the model; after a `Stopped` it saves what
    there is. Any other error passes: nothing is written, and no collective is called.
    """

    config: Config
    attempt: Attempt
    policy: Policy
    generation: Generation
    inputs: Inputs
    position: Position
    checkpoints: Checkpoints
    writer: MetricsWriter
    stopwatch: Stopwatch
    memory: StepMemory
    gloo_group: dist.ProcessGroup | None
    """All ranks of the trainer, for what is on the host."""

    @classmethod
    def start(cls, config: Config, *, keep_weights: bool = True) -> Run:
        """Check, join the other ranks, build the model, go on from a checkpoint, start the engine.

        Args:
            config: the run's settings; `train.check_before_imports` has passed them.
            keep_weights: False: it is run for its timings, and writes no checkpoint and no model.

        Returns:
            The run at the newest whole checkpoint of its folder, at the branch point, or at its
            beginning. One that is finished already has no steps, and builds neither model nor
            engine. A rank that only generates has none either: it serves the others meanwhile.

        Collectives: those of the phases in `run.start`, in this order.

        Raises:
            GapoError: what a user can get wrong is found before any model is built.
        """
        startup = Stopwatch()
        startup.seconds["imports"] = process_age_s()
        inputs = start.check_inputs(config)
        world, attempt = start.join(config, inputs, startup)
        if start.is_finished_everywhere(config, world, attempt):
            return FinishedRun(config, attempt)
        if world.bridge is not None and world.bridge.is_generation:
            return ServingRun(start.start_side(config, inputs, world, attempt, startup))
        start.begin_branch(config, inputs, attempt, startup)

        # The workers that judge start while the model is built.
        pool = None if world.bridge else start.start_pool(config)
        policy = start.build_policy(config, world, attempt, startup)
        position, resumed = start.resume(config, policy, inputs.source, attempt, startup)
        stopwatch = Stopwatch()
        stopwatch.recent = attempt.stage_seconds()
        trainer = start.Trainer(config, inputs, world, attempt, policy, position, stopwatch)
        generation = start.start_generation(trainer, pool, startup)
        stopwatch.lap(num_tokens=0)  # the steps begin here
        writer = MetricsWriter(
            config.run.output_dir,
            config=config,
            resume_step=position.step,
            enabled=world.rank == 0,
        )
        writer.log_startup(position.step, startup.seconds, sizes=start.sizes(world))
        channel = GroupChannel(world.gloo_group)
        checkpoints = Checkpoints(
            config, policy, generation, channel, attempt, stopwatch, keep_weights
        )
        if resumed is not None:
            generation.resume(resumed.open_groups)
            checkpoints.note_resumed(resumed)
        return cls(
            config=config,
            attempt=attempt,
            policy=policy,
            generation=generation,
            inputs=inputs,
            position=position,
            checkpoints=checkpoints,
            writer=writer,
            stopwatch=stopwatch,
            memory=StepMemory(world.device),
            gloo_group=world.gloo_group,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the run, finished or stopped; every other error passes. Collective."""
        if error is None:
            self._finish()
        elif isinstance(error, Stopped):
            self._stop()
        else:
            return False
        return True

    def steps(self) -> Iterator[int]:
        """Indices of the steps to take; evaluates before a step and saves after it, where due.

        A step that a stop has cut in two comes first: it has its batch already, and is not sampled
        again. After the last step there is one more evaluation.

        Collectives: per step a broadcast, those of `evaluate` and of `Checkpoints.save`.

        Raises:
            Stopped: a stop was asked for, or the job's time does not last for the next part.
        """
        position, num_steps = self.position, self.config.run.num_steps
        if position.open_step is not None:
            if position.open_step.evaluated:
                self.writer.log(position.step, position.open_step.evaluated)
            self.generation.leave_memory()
        while (step := position.step) <= num_steps:
            self.stopwatch.on_enter = self._name_stages(step)
            position.source_state = self.generation.source_state
            if position.open_step is None:
                self._stop_if_asked_before(step)
                position.evaluated = self._evaluate_if_due(step)
                if step == num_steps:
                    return
            yield step
            position.finish_step()
            if self.checkpoints.is_due(position.step):
                self._open_step_ahead()
            self.checkpoints.save_if_due(position)
        raise Stopped  # resumed beyond its last step: `num_steps` was more when it was saved

    def collect(self, step: int) -> Collected | None:
        """Sample and judge the rollouts of a step; then the policy has its memory.

        Groups that stay open for the next step get the log-probs of this step's weights.

        Returns:
            The same on every rank; None where the step has its batch already.

        Collectives: those of `Generation.collect`, then of `Generation.carry`.

        Raises:
            Stopped: a stop was asked for; the prompts are drawn again.
        """
        if self.position.open_step is not None:
            return None
        collected = self.generation.collect(step)
        if collected is None:
            raise Stopped
        self.position.take_batch(self.generation.source_state)
        self.memory.note("after_sleep")
        self.generation.carry(step)
        return collected

    def make_batch(self, rollouts: Collected | None) -> Batch:
        """Give every sequence its group's c and k and its advantage. From here on a step is open.

        Args:
            rollouts: from `collect`; None where the step has its batch already.

        Returns:
            The step's batch: the same on every rank, but for its tokens, which are this rank's
            share.

        Collectives: those of `Generation.bring_tokens`.
        """
        position, config = self.position, self.config
        if rollouts is not None:
            batch = make_batch(rollouts.facts, config.objective.resolve())
            batch = self.generation.bring_tokens(batch)
            metrics = rollouts.metrics
            metrics |= count_by_correct(batch, group_size=config.batch.rollouts_per_prompt)
            position.open(batch, metrics)
        assert position.open_step is not None, "a step without rollouts has its batch"
        return position.open_step.batch

    def learn(self, batch: Batch) -> dict[str, float]:
        """Plan the batch, without what has A = 0; old log-probs; one update per mini-batch.

        Returns:
            Metrics of the updates, the same on every rank.

        Collectives: those of `learn.step.learn`.

        Raises:
            Stopped: a stop was asked for between two updates; those done are kept.
        """
        config, open_step = self.config, self.position.open_step
        assert open_step is not None
        with self.stopwatch("plan"):
            dp_size = self.policy.groups.dp_size
            packing = plan_updates(batch, config, data_parallel_size=dp_size)
        measures = rounding.is_due(self.position.step, config, self.policy.device)
        stages = ("old_log_probs", "update", "rounding")[: 2 + measures]
        learned = learn(
            self.policy,
            batch,
            packing,
            config,
            self.stopwatch,
            progress=open_step.progress,
            measures_rounding=measures,
            must_stop=lambda: self._must_stop(*stages),
        )
        if learned is None:
            raise Stopped
        self.memory.note("update_peak")
        return learned

    def sync(self, step: int, batch: Batch) -> WeightCheck | None:
        """Give the engines the new weights, proved by the log-probs of the batch's first sequences.

        Returns:
            The proof; None where weights are sent after every few steps, and not after this one.

        Collectives: those of `Generation.sync`.

        Raises:
            WeightSyncError: an engine does not compute what the policy computes.
        """
        probe = first_sequences(batch, VERIFIED_SEQUENCES)
        check = self.generation.sync(probe, policy_version=step + 1)
        self.memory.note("after_wake")
        if not self._evaluation_is_due(step + 1):
            self.generation.sample_ahead()
        return check

    def log(
        self, step: int, batch: Batch, learned: dict[str, float], synced: WeightCheck | None
    ) -> None:
        """Write the step's metrics and timings; the step is done.

        Its checkpoint follows: a kill between the two repeats the step, and its line is replaced.

        Collectives: those of `StepMemory.lap`.
        """
        open_step = self.position.open_step
        assert open_step is not None
        self.stopwatch.notes |= self.memory.lap(self.gloo_group)
        metrics = open_step.metrics | learned | self.position.window.add(learned)
        if synced is not None:
            metrics["sync/max_abs_log_prob_diff"] = synced.max_abs_diff
        num_tokens = int(batch.num_response_tokens.sum())
        self.writer.log(step, metrics, self.stopwatch.lap(num_tokens=num_tokens))

    def _finish(self) -> None:
        """Leave the model behind, and tell the launcher. Collective."""
        self.writer.close()
        if self.checkpoints.keep_weights:
            self.attempt.enter("export")
            self.generation.leave_memory()  # weights that were offloaded need it
            export(self.config, self.policy, self.attempt)
        self.generation.close()
        self.attempt.end("finished")

    def _stop(self) -> None:
        """Save where the run is, with its open step if there is one. Collective."""
        position, step = self.position, self.position.step
        # An evaluation that is due comes before a step opens.
        may_open = position.open_step is None and not self._evaluation_is_due(step)
        if may_open and self.generation.has_batch(step):
            self.make_batch(self.collect(step))
        num_tokens = self.generation.give_up()
        if self.generation.samples_ahead:  # else the same samples come again
            position.give_back(num_tokens)
        self.writer.close()
        self.checkpoints.save_if_moved(position)
        self.generation.close()
        self.attempt.end("stopped")

    def _open_step_ahead(self) -> None:
        """Open the next step where its batch was sampled ahead: a checkpoint has to hold it.

        Collectives: a broadcast; those of `evaluate`, `collect` and `make_batch`.
        """
        position = self.position
        if self.generation.samples_ahead and position.step < self.config.run.num_steps:
            self._stop_if_asked_before(position.step)
            position.evaluated = self._evaluate_if_due(position.step)
            self.make_batch(self.collect(position.step))

    def _evaluation_is_due(self, step: int) -> bool:
        every_steps = self.config.evaluation.every_steps
        return bool(self.inputs.held_out) and (
            step == self.config.run.num_steps or step % every_steps == 0
        )

    def _stop_if_asked_before(self, step: int) -> None:
        """Raise Stopped where what comes before the next question may not be begun. Collective."""
        stages = ["evaluate"] if self._evaluation_is_due(step) else []
        if step < self.config.run.num_steps:
            stages += self.generation.stages
        if self._must_stop(*stages):
            raise Stopped

    def _must_stop(self, *stages: str) -> bool:
        """Whether there is a stop, or too little time for `stages` and a save. Collective."""
        return self.attempt.must_stop(self.stopwatch.expect(*stages, "checkpoint"))

    def _evaluate_if_due(self, step: int) -> dict[str, float]:
        """Evaluate and log; the metrics, empty where no evaluation is due. Collective."""
        if not self._evaluation_is_due(step):
            return {}
        evaluated = self.generation.evaluate(step)
        if evaluated is None:
            raise Stopped
        self.writer.log(step, evaluated)
        return evaluated

    def _name_stages(self, step: int) -> Callable[[str], None]:
        return lambda stage: self.attempt.enter(f"step {step}: {stage}")


class FinishedRun(Run):
    """A run whose steps are all done: there is nothing to train, to save or to export."""

    def __init__(self, config: Config, attempt: Attempt) -> None:
        self.config = config
        self.attempt = attempt

    def steps(self) -> Iterator[int]:
        """None."""
        run = self.config.run
        logger.info("all %d steps are done: %s", run.num_steps, Path(run.output_dir) / "hf")
        return iter(())

    def _finish(self) -> None:
        self.attempt.end("finished")


class ServingRun(Run):
    """A run as a rank sees it that only generates: it has no steps of its own."""

    def __init__(self, side: GenerationSide) -> None:
        self._side = side

    def steps(self) -> Iterator[int]:
        """None; serves the trainer until it ends the run. Collective over both sides."""
        self._side.serve()
        return iter(())

    def _finish(self) -> None:
        self._side.end()
