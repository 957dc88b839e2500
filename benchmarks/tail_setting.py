"""The setting of `benchmarks/tail.py`: lengths, costs, and stand-ins for what is not measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gapo_megatron.clock import Expectation
from gapo_megatron.config import Config, load_config, parse_config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.ops.plan.flops import Shape, element_bytes
from gapo_megatron.ops.plan.hardware import GPUS, Efficiency
from gapo_megatron.ops.plan.planner import read_model
from gapo_megatron.ops.plan.times import Decoding
from gapo_megatron.types import Episode, Prompt
from tests.timed_engine import Costs, Lengths

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_RANKS, NUM_PROMPTS, GROUP_SIZE = 8, 64, 8
LIMIT, PROMPT_TOKENS = 32_768, 200
UNIT = 64
"""Tokens that one token of these engines stands for: 512 decoding steps, not 32,768."""
LENGTHS = Lengths(median=10_480 / UNIT, spread=0.7)
"""The planner's default spread; 12,720 on average, 5 % of the responses at the limit."""
SYNC_S = 9.9
"""The planner's, for this model and these GPUs."""
TRAINING_S = {"light": 26.0, "heavy": 207.0}
"""Training on a batch of mean length on all ranks. Light: the planner's, for this model and these
GPUs; generation is 95 % of a plain step. Heavy: generation is 70 %, as verl has it for a dense
model on 128 H20 (348 of 498 s)."""
MEAN_STEP_TOKENS = NUM_PROMPTS * GROUP_SIZE * 12_720
FORWARD_SHARE = 2 / 7.5
"""Of a token's training a forward pass: 6 parts update, 2 old log-probs of three mini-batches in
four."""


@dataclass(frozen=True)
class Schedule:
    """How generation and training share the ranks."""

    oversampling: float = 1.0
    partial_rollouts: bool = False
    generation_ranks: int = 0
    max_staleness: int = 0


@dataclass(frozen=True)
class Setting:
    """What all schedules share."""

    speed: float
    """Modelled seconds in a second."""
    training_s: float
    """Modelled seconds of training on a batch of mean length, all ranks training."""
    num_steps: int
    first_step: int
    """First step that counts: partial rollouts and stale batches take some to fill up."""


@dataclass
class Lane:
    """What one rank did, in modelled seconds since the start."""

    start_s: float
    speed: float
    training: list[tuple[float, float]] = field(default_factory=list)
    sync: list[tuple[float, float]] = field(default_factory=list)
    running: list[tuple[float, int]] = field(default_factory=list)
    """Requests that run in this rank's engine from then on."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Of a trainer: the end of each step, tokens that it learned from, metrics."""
    generations: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each batch's sampling."""

    def now(self) -> float:
        """Modelled seconds since the start."""
        return self.modelled(time.monotonic())

    def modelled(self, clock_s: float) -> float:
        """Of a time of the clock."""
        return (clock_s - self.start_s) * self.speed


class Guess:
    """An environment of one turn whose verdict is the number of the response: half are right."""

    def begin(self, prompt: Prompt) -> Sequence[int]:
        """The prompt's own tokens."""
        return prompt.token_ids

    def respond(self, episode: Episode) -> None:
        """The end."""

    def judge(self, episode: Episode) -> tuple[str, str]:
        """Right for every other response."""
        return str(episode.sample % 2), "1"


class Unattended:
    """What a run's `Attempt` is to generation: nobody asks for a stop, and nobody watches."""

    def __init__(self, *, leads: bool) -> None:
        """`leads`: whether this rank posts the orders."""
        self.leads = leads
        self.on_alive: Callable[[], object] = lambda: None

    def alive(self) -> None:
        """Beat for the other side."""
        self.on_alive()

    def restart_watch(self) -> None:
        """No watch."""

    def enter(self, stage: str) -> None:
        """No watch."""

    def patience(self, expected: Expectation) -> Callable[[float], bool]:
        """Never breaks off."""

        def answer(elapsed_s: float) -> bool:
            self.alive()
            return False

        return answer


def engine_costs() -> Costs:
    """The planner's decoding steps: Qwen3-30B-A3B on 4 H100, UNIT of them a step of ours."""
    config = load_config(REPOSITORY / "configs/qwen3_30b_a3b/h100_24k.toml")
    hf_config, _ = read_model(config)
    shape, gpu, efficiency = Shape.of(hf_config), GPUS["h100"], Efficiency()
    decoding = Decoding(
        shape=shape,
        tp_size=config.rollout.tensor_parallel_size,
        element_bytes=element_bytes(config),
        flops=gpu.flops("bf16"),
        gpu=gpu,
        efficiency=efficiency,
    )

    def step_s(count: int, mean_tokens: float) -> float:
        return UNIT * float(decoding.step_s(np.array([count]), np.array([UNIT * mean_tokens]))[0])

    flops = 2 * (shape.num_layers * shape.active_layer_weights + shape.head_weights)
    speed = decoding.tp_size * gpu.flops("bf16") * efficiency.matmul
    return Costs(step_s, prefill_token_s=UNIT * flops / speed, weights_s=SYNC_S)


def make_config(schedule: Schedule, num_steps: int) -> Config:
    """The settings that the two sides read."""
    return parse_config(
        {
            "run": {"output_dir": "unused", "num_steps": num_steps},
            "model": {"hf_dir": "unused"},
            "data": {"train_path": "unused", "max_prompt_tokens": 16},
            "batch": {
                "rollout_prompts": NUM_PROMPTS,
                "minibatch_prompts": NUM_PROMPTS // 4,
                "rollouts_per_prompt": GROUP_SIZE,
                "oversampling": schedule.oversampling,
                "partial_rollouts": schedule.partial_rollouts,
            },
            "rollout": {
                "max_response_tokens": LIMIT // UNIT,
                "generation_ranks": schedule.generation_ranks,
                "max_staleness": schedule.max_staleness,
            },
            "objective": {"importance_weight_max": 2.0},
            "reward": {"kind": "exact"},
        },
        source="benchmark",
    )


def make_source() -> PromptSource:
    """Problems enough for a run."""
    tokens = (1,) * (PROMPT_TOKENS // UNIT)
    return PromptSource([Prompt(str(i), tokens, "") for i in range(2000)], seed=0)
