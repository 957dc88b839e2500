"""Where rollouts come from: what draws prompts, and the groups that the next step goes on with."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from gapo_megatron import rewards
from gapo_megatron.clock import Patient, Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.rollout.rollouter import Sampled, sample
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.types import OpenGroup


@dataclass
class Rollouter:
    """`rollout.rollouter.sample` with what it needs at every step."""

    engine: RolloutEngine
    source: PromptSource
    pool: rewards.Pool
    tokenizer: PreTrainedTokenizerBase
    config: Config
    open_groups: list[OpenGroup] = field(default_factory=list)
    """What the next step goes on with; the same on every rank."""

    def collect(self, step: int, *, attempt: Patient, stopwatch: Stopwatch) -> Sampled | None:
        """Rollouts of one step and their verdicts; see `rollout.rollouter.sample`."""
        sampled = sample(
            self.engine,
            self.source,
            self.pool,
            self.tokenizer,
            self.config,
            open_groups=self.open_groups,
            attempt=attempt,
            stopwatch=stopwatch,
            step=step,
        )
        if sampled is not None:
            self.open_groups = sampled.open_groups
        return sampled
