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

from gapo_megatron import rewards
from gapo_megatron.checkpoint import OpenStep
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import VERIFIED_SEQUENCES, Config
from gapo_megatron.evaluate.evaluate import evaluate
from gapo_megatron.io.run_folder import is_finished
from gapo_megatron.learn.carry import carry
from gapo_megatron.learn.noise_floor import watch_noise_floor
from gapo_megatron.learn.plan import plan_updates
from gapo_megatron.learn.share import Places, bring_tokens
from gapo_megatron.learn.step import learn
from gapo_megatron.objective import make_batch
from gapo_megatron.objective.diagnostics import count_by_correct
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.rollouter import Rollouter, Sampled
from gapo_megatron.rollout.sync import first_sequences, sync
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.run import start
from gapo_megatron.run.attempt import Attempt
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
    places: Places
    engine: Engine
    rollouter: Rollouter
    inputs: Inputs
    pool: rewards.Pool
    position: Position
    checkpoints: Checkpoints
    writer: MetricsWriter
    stopwatch: Stopwatch
    memory: StepMemory

    @classmethod
    def start(cls, config: Config, *, keep_weights: bool = True) -> Run:
        """Check, join the other ranks, build the model, go on from a checkpoint, start the engine.

        Args:
            config: the run's settings; `train.check_before_imports` has passed them.
            keep_weights: False: it is run for its timings, and writes no checkpoint and no model.

        Returns:
            The run at the newest whole checkpoint of its folder, at the branch point, or at its
            beginning. One that is finished already has no steps, and builds neither model nor
            engine.

        Collectives: those of the phases in `run.start`, in this order.

        Raises:
            GapoError: what a user can get wrong is found before any model is built.
        """
        startup = Stopwatch()
        startup.seconds["imports"] = process_age_s()
        inputs = start.check_inputs(config)
        world, attempt = start.join(config, inputs, startup)
        run_dir, is_first = config.run.output_dir, world.rank == 0
        if attempt.agree(is_first and is_finished(run_dir, num_steps=config.run.num_steps)):
            return FinishedRun(config, attempt)
        start.begin_branch(config, inputs, attempt, startup)

        # The workers of the pool start while the model is built.
        pool = start.start_pool(config)
        policy = start.build_policy(config, world, attempt, startup)
        position, resumed = start.resume(config, policy, inputs.source, attempt, startup)
        engine = start.start_engine(
            config, inputs, policy, policy_version=position.step, startup=startup
        )
        pool.wait_until_ready()

        writer = MetricsWriter(run_dir, config=config, resume_step=position.step, enabled=is_first)
        writer.log_startup(position.step, startup.seconds, world_size=world.world_size)
        stopwatch = Stopwatch()
        stopwatch.recent = attempt.stage_seconds()
        rollouter = Rollouter(engine, inputs.source, pool, inputs.tokenizer, config)
        checkpoints = Checkpoints(config, policy, rollouter, attempt, stopwatch, keep_weights)
        if resumed is not None:
            rollouter.resume(resumed.open_groups)
            checkpoints.note_resumed(resumed)
        return cls(
            config=config,
            attempt=attempt,
            policy=policy,
            places=Places.gather(policy.groups, engine.replicas.gloo_group),
            engine=engine,
            rollouter=rollouter,
            inputs=inputs,
            pool=pool,
            position=position,
            checkpoints=checkpoints,
            writer=writer,
            stopwatch=stopwatch,
            memory=StepMemory(world.device),
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
            self.engine.sleep()
        while (step := position.step) <= num_steps:
            self.stopwatch.on_enter = self._name_stages(step)
            position.source_state = self.inputs.source.state_dict()
            if position.open_step is None:
                self._stop_if_asked_before(step)
                position.evaluated = self._evaluate_if_due(step)
                if step == num_steps:
                    return
            yield step
            position.finish_step()
            self.checkpoints.save_if_due(position)
        raise Stopped  # resumed beyond its last step: `num_steps` was more when it was saved

    def collect(self, step: int) -> Sampled | None:
        """Sample and judge the rollouts of a step; then the engine leaves its memory to the policy.

        Groups that stay open for the next step get the log-probs of this step's weights.

        Returns:
            Facts the same on every rank, tokens where they were judged; None where the step has
            its batch already.

        Collectives: those of `Rollouter.collect`, then of `learn.carry.carry`.

        Raises:
            Stopped: a stop was asked for; the prompts are drawn again.
        """
        if self.position.open_step is not None:
            return None
        sampled = self.rollouter.collect(step, attempt=self.attempt, stopwatch=self.stopwatch)
        if sampled is None:
            raise Stopped
        self.position.source_state = sampled.source_state
        with self.stopwatch("sleep"):
            self.engine.sleep()
        self.memory.note("after_sleep")
        if len(self.rollouter.open_groups):
            with self.stopwatch("carry"):
                self.rollouter.open_groups = carry(
                    self.policy,
                    self.rollouter.open_groups,
                    self.config,
                    policy_version=step,
                    places=self.places,
                    channel=self.rollouter.channel,
                )
        return sampled

    def make_batch(self, step: int, rollouts: Sampled | None) -> Batch:
        """Give every sequence its group's c and k and its advantage. From here on a step is open.

        Args:
            step: index of the step.
            rollouts: from `collect`; None where the step has its batch already.

        Returns:
            The step's batch: facts of all sequences, tokens of this rank's share.

        Collectives: those of `bring_tokens` and `watch_noise_floor`.

        Raises:
            ConfigError: the noise floor is too high for the clip, see `watch_noise_floor`.
        """
        position, config = self.position, self.config
        if rollouts is not None:
            batch = bring_tokens(
                make_batch(rollouts.facts, config.objective.resolve()),
                rollouts.held,
                config,
                places=self.places,
                channel=self.rollouter.channel,
            )
            metrics = rollouts.metrics
            metrics |= count_by_correct(batch, group_size=config.batch.rollouts_per_prompt)
            metrics |= watch_noise_floor(
                self.policy,
                batch,
                config,
                self.stopwatch,
                step=step,
                first_sampled=position.first_sampled,
            )
            position.open_step = OpenStep(batch, metrics, position.evaluated)
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
        learned = learn(
            self.policy,
            batch,
            packing,
            config,
            self.stopwatch,
            progress=open_step.progress,
            must_stop=lambda: self._must_stop("old_log_probs", "update"),
        )
        if learned is None:
            raise Stopped
        self.memory.note("update_peak")
        return learned

    def sync(self, step: int, batch: Batch) -> WeightCheck:
        """Give the engine the new weights, proved by the log-probs of the batch's first sequences.

        Collectives: those of `rollout.sync.sync`.

        Raises:
            WeightSyncError: the engine does not compute what the policy computes.
        """
        with self.stopwatch("sync"):
            probe = first_sequences(batch, VERIFIED_SEQUENCES)
            check = sync(self.policy, self.engine, probe, policy_version=step + 1)
        self.memory.note("after_wake")
        return check

    def log(self, step: int, batch: Batch, learned: dict[str, float], synced: WeightCheck) -> None:
        """Write the step's metrics and timings; the step is done.

        Its checkpoint follows: a kill between the two repeats the step, and its line is replaced.

        Collectives: those of `StepMemory.lap`.
        """
        open_step = self.position.open_step
        assert open_step is not None
        self.stopwatch.notes |= self.memory.lap(self.engine.replicas.gloo_group)
        metrics = open_step.metrics | learned | self.position.window.add(learned)
        metrics["sync/max_abs_log_prob_diff"] = synced.max_abs_diff
        num_tokens = int(batch.num_response_tokens.sum())
        self.writer.log(step, metrics, self.stopwatch.lap(num_tokens=num_tokens))

    def _finish(self) -> None:
        """Leave the model behind, and tell the launcher. Collective."""
        self._close()
        if self.checkpoints.keep_weights:
            self.attempt.enter("export")
            self.engine.sleep()  # weights that were offloaded need its memory
            export(self.config, self.policy, self.attempt)
        self.attempt.end("finished")

    def _stop(self) -> None:
        """Save where the run is, with its open step if there is one. Collective."""
        self._close()
        self.checkpoints.save_if_moved(self.position)
        self.attempt.end("stopped")

    def _close(self) -> None:
        self.writer.close()
        self.pool.close()

    def _evaluation_is_due(self, step: int) -> bool:
        every_steps = self.config.evaluation.every_steps
        return bool(self.inputs.held_out) and (
            step == self.config.run.num_steps or step % every_steps == 0
        )

    def _stop_if_asked_before(self, step: int) -> None:
        """Raise Stopped where what comes before the next question may not be begun. Collective."""
        stages = ["evaluate"] if self._evaluation_is_due(step) else []
        if step < self.config.run.num_steps:
            num_rounds = 1 + self.config.batch.dynamic_sampling_rounds
            stages += [*["rollout", "reward"] * num_rounds, "carry"]
        if self._must_stop(*stages):
            raise Stopped

    def _must_stop(self, *stages: str) -> bool:
        """Whether there is a stop, or too little time for `stages` and a save. Collective."""
        return self.attempt.must_stop(self.stopwatch.expect(*stages, "checkpoint"))

    def _evaluate_if_due(self, step: int) -> dict[str, float]:
        """Evaluate and log; the metrics, empty where no evaluation is due. Collective."""
        if not self._evaluation_is_due(step):
            return {}
        output = Path(self.config.run.output_dir) / "evaluations" / f"step_{step}.json"
        with self.stopwatch("evaluate"):
            evaluated = evaluate(
                self.engine,
                self.inputs.held_out,
                pool=self.pool,
                environment=self.rollouter.environment,
                config=self.config,
                output=output if self.policy.groups.rank == 0 else None,
                should_abandon=self.attempt.patience(self.stopwatch.expect("evaluate")),
            )
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
