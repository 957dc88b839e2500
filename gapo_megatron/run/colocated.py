"""Generation on the trainer's own ranks: engine and policy take turns on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.evaluate.evaluate import evaluate
from gapo_megatron.learn.checks.carry import carry
from gapo_megatron.learn.plan import DataParallelRanks, bring_tokens
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.rollout.sync import sync
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.generation import evaluation_path
from gapo_megatron.types import Episode, Prompt


@dataclass
class Colocated:
    """A `Generation` with its engine in this process; the rollouter draws, samples and judges."""

    config: Config
    engine: Engine
    rollouter: Rollouter
    policy: Policy
    pool: rewards.Pool
    source: PromptSource
    held_out: Sequence[Prompt]
    attempt: Attempt
    stopwatch: Stopwatch
    dp_ranks: DataParallelRanks
    samples_ahead = False
    num_lost = 0

    @property
    def source_state(self) -> Mapping[str, Any]:
        """Data position, aborted batches included."""
        return self.source.state_dict()

    @property
    def stages(self) -> Sequence[str]:
        """Sampling and judging, as often as dynamic sampling may repeat them."""
        num_rounds = 1 + self.config.batch.dynamic_sampling_rounds
        return [*["rollout", "reward"] * num_rounds, "carry"]

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Sample and judge the held-out problems: `Generation.evaluate`."""
        with self.stopwatch("evaluate"):
            return evaluate(
                self.engine,
                self.held_out,
                pool=self.pool,
                environment=self.rollouter.environment,
                config=self.config,
                calls=self.rollouter.evaluation_calls(step),
                output=evaluation_path(self.config.run.output_dir, step)
                if self.attempt.leads
                else None,
                should_abort=self.attempt.patience(self.stopwatch.expect("evaluate")),
            )

    def collect(self, step: int) -> Rollouts | None:
        """Sample and judge, then put the engine to sleep: `Generation.collect`."""
        rollouts = self.rollouter.collect(step, attempt=self.attempt, stopwatch=self.stopwatch)
        if rollouts is not None:
            with self.stopwatch("sleep"):
                self.engine.sleep()
        return rollouts

    def carry(self, step: int) -> None:
        """Score open groups at the weights that sampled them: `Generation.carry`."""
        if len(self.rollouter.open_groups):
            with self.stopwatch("carry"):
                self.rollouter.open_groups = carry(
                    self.policy,
                    self.rollouter.open_groups,
                    max_tokens_per_microbatch=self.config.batch.max_tokens_per_microbatch,
                    ranks=self.dp_ranks,
                    channel=self.rollouter.channel,
                )

    def bring_tokens(self, batch: Batch) -> Batch:
        """Send what this rank has sampled, receive its share: `Generation.bring_tokens`."""
        with self.stopwatch("exchange"):
            return bring_tokens(batch, ranks=self.dp_ranks, channel=self.rollouter.channel)

    def sync(self, probe: Rollouts, *, policy_version: int) -> WeightCheck:
        """Wake the engine with the policy's weights: `Generation.sync`."""
        with self.stopwatch("sync"):
            return sync(self.policy, self.engine, probe, policy_version=policy_version)

    def gather_open_groups(self, *, before_batch: bool = False) -> Sequence[tuple[Episode, ...]]:
        """Groups with unfinished responses, on rank 0: `Generation.gather_open_groups`.

        Never those before a batch, as nothing is sampled ahead.
        """
        return self.rollouter.gather_open_groups()

    def sample_ahead(self) -> None:
        """Do nothing: the policy uses the engine's memory while it learns."""

    def has_batch(self, step: int) -> bool:
        """Nothing is sampled ahead."""
        return False

    def discard_ahead(self) -> int:
        """Nothing is sampled ahead."""
        return 0

    def leave_memory(self) -> None:
        """Put the engine to sleep."""
        self.engine.sleep()

    def close(self) -> None:
        """End the verifier workers."""
        self.pool.close()
