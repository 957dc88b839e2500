"""What waiting for the longest responses costs, and what each schedule gains: ranks that take time.

    python benchmarks/tail.py --output tail.json               every schedule
    python benchmarks/tail.py --only plain partial_2 --steps 12

Eight ranks on this machine run the package's own rollouts (`Rollouter`, `generate`, verdicts, the
heartbeat) on engines that compute nothing and sleep as long as the planner says that decoding takes
(`tests/timed_engine.py`); training sleeps too. Ranks that sleep do not share cores, so this says
what a schedule waits for, not what two cores can do. `benchmarks/tail_report.py` draws it.

The setting is the one in which verl publishes its schedules (docs/advance/v1_async_trainer.md):
64 prompts x 8 responses, up to 32,768 tokens, 12,720 on average, 35 billion parameters of which 3
are active, on 32 GPUs with engines of 4.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron import rewards
from gapo_megatron.clock import Expectation, Stopwatch
from gapo_megatron.config import Config, load_config, parse_config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.facts import Facts, Spread
from gapo_megatron.objective import make_batch
from gapo_megatron.ops.plan.efficiency import Efficiency
from gapo_megatron.ops.plan.flops import Shape, element_bytes
from gapo_megatron.ops.plan.generation import Decoding
from gapo_megatron.ops.plan.hardware import GPUS
from gapo_megatron.ops.plan.planner import read_model
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.rollouter import Rollouter, Sampled
from gapo_megatron.run import bridge as bridge_module
from gapo_megatron.run import generation_ranks as generation_module
from gapo_megatron.run.generation_ranks import GenerationRanks
from gapo_megatron.run.generation_side import GenerationSide
from gapo_megatron.run.process_group import World
from gapo_megatron.types import Episode, Prompt, Sequences
from tests.timed_engine import Costs, Lengths, Pace, TimedEngine

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


SCHEDULES = {
    "plain": Schedule(),
    "over_1.25": Schedule(1.25),
    "over_1.5": Schedule(1.5),
    "partial_1.5": Schedule(1.5, partial_rollouts=True),
    "partial_2": Schedule(2.0, partial_rollouts=True),
    "partial_3": Schedule(3.0, partial_rollouts=True),
    "partial_4": Schedule(4.0, partial_rollouts=True),
    "nodes_4_stale_0": Schedule(generation_ranks=4),
    "nodes_4_stale_1": Schedule(generation_ranks=4, max_staleness=1),
    "nodes_5_stale_1": Schedule(generation_ranks=5, max_staleness=1),
    "nodes_6_stale_1": Schedule(generation_ranks=6, max_staleness=1),
    "nodes_7_stale_1": Schedule(generation_ranks=7, max_staleness=1),
    "nodes_5_stale_2": Schedule(generation_ranks=5, max_staleness=2),
}


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


def run_rank(world: World, setting: Setting, schedule: Schedule, start_s: float) -> Lane:
    """One rank of a run, the training ones first; called on all of them."""
    lane = Lane(start_s, setting.speed)
    config = make_config(schedule, setting.num_steps)
    bridge = world.bridge
    # Pauses of a wait are as short, beside the rest, as they are in a run.
    bridge_module._LONGEST_LOOK_S /= setting.speed
    if bridge is None:
        with Sampler(setting, config, world, lane) as sampler:
            colocated(Trainer(setting, world, lane), sampler)
    elif bridge.is_generation:
        with Sampler(setting, config, world, lane) as sampler:
            side = GenerationSide(
                config=config,
                bridge=bridge,
                source=sampler.source,
                held_out=(),
                attempt=cast(Any, Unattended(leads=False)),
                engine=sampler.engine,
                rollouter=sampler.rollouter,
                pool=sampler.pool,
                is_first=world.rank == 0,
            )
            side.serve()
            bridge.close()
    else:
        training_side(Trainer(setting, world, lane), config)
    return lane


class TimedRollouter(Rollouter):
    """Notes when it sampled what."""

    lane: Lane

    def collect(self, step: int, **settings: Any) -> Sampled | None:
        """As `Rollouter.collect`."""
        begin = self.lane.now()
        sampled = super().collect(step, **settings)
        self.lane.generations.append((begin, self.lane.now()))
        return sampled


class Sampler:
    """One rank's engine and rollouts."""

    def __init__(self, setting: Setting, config: Config, world: World, lane: Lane) -> None:
        """Collective over all ranks with an engine."""
        self.lane = lane
        self.engine = TimedEngine(
            LENGTHS,
            engine_costs(),
            Pace(setting.speed),
            replicas=Replicas.create(1, gloo_group=world.gloo_group),
            max_sequence_tokens=2 * LIMIT,
        )
        self.source = make_source()
        self.pool = rewards.start_pool(config.reward, num_workers=1)
        self.pool.wait_until_ready()
        tokenizer = None  # for the default environment alone
        self.rollouter = TimedRollouter(
            self.engine, self.source, self.pool, tokenizer, config, environment=Guess()
        )
        self.rollouter.lane = lane
        dist.barrier(world.gloo_group)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        self.lane.running = [(self.lane.modelled(at), count) for at, count in self.engine.running]


def make_source() -> PromptSource:
    """Problems enough for a run."""
    tokens = (1,) * (PROMPT_TOKENS // UNIT)
    return PromptSource([Prompt(str(i), tokens, "") for i in range(2000)], seed=0)


@dataclass
class Trainer:
    """One training rank."""

    setting: Setting
    world: World
    lane: Lane

    def learn(self, num_tokens: float) -> None:
        """Train on so many tokens, over all training ranks."""
        share = num_tokens / MEAN_STEP_TOKENS * NUM_RANKS / self.world.world_size
        self._take(share * self.setting.training_s, self.lane.training)

    def sync(self) -> None:
        """Send the weights."""
        self._take(SYNC_S, self.lane.sync)

    def _take(self, seconds: float, part: list[tuple[float, float]]) -> None:
        dist.barrier(self.world.gloo_group)
        begin, pace = self.lane.now(), Pace(self.setting.speed)
        pace.begin()
        pace.take(seconds)
        part.append((begin, self.lane.now()))

    def log(self, metrics: dict[str, float], num_tokens: int) -> None:
        """End a step."""
        self.lane.steps.append({"end_s": self.lane.now(), "num_tokens": num_tokens} | metrics)


def num_learned(facts: Facts) -> int:
    """Tokens of a batch."""
    return UNIT * int(facts.num_sampled_tokens.sum())


def colocated(trainer: Trainer, sampler: Sampler) -> None:
    """Generation and training in turns on every rank."""
    rollouter, engine = sampler.rollouter, sampler.engine
    stopwatch, attempt = Stopwatch(), Unattended(leads=False)
    for step in range(trainer.setting.num_steps):
        sampled = rollouter.collect(step, attempt=attempt, stopwatch=stopwatch)
        assert sampled is not None
        rollouter.open_groups, num_scored = carry(rollouter.open_groups, step)
        num_tokens = num_learned(sampled.facts)
        trainer.learn(num_tokens + FORWARD_SHARE * UNIT * num_scored)
        trainer.sync()
        engine.policy_version = step + 1
        idle = stopwatch.notes["perf/rollout_idle_share"]
        trainer.log(sampled.metrics | {"perf/rollout_idle_share": idle}, num_tokens)


def carry(groups: Spread, step: int) -> tuple[Spread, int]:
    """As `learn.carry.carry` without a policy; and the tokens that it would score."""
    facts = groups.facts
    has_new = facts.num_response_tokens > facts.num_carried_tokens
    has_begun = (facts.num_carried_tokens == 0) & has_new
    carried = facts.changed(
        num_carried_tokens=facts.num_response_tokens,
        num_carried_sampled=facts.num_sampled_tokens,
        oldest_version=np.where(has_begun, step, facts.oldest_version),
    )
    held = {
        i: replace(one, carried_log_probs=one.rollout_log_probs) for i, one in groups.held.items()
    }
    return Spread(carried, held), int(facts.num_response_tokens[has_new].sum())


def training_side(trainer: Trainer, config: Config) -> None:
    """Train on what the other side samples."""
    world, lane = trainer.world, trainer.lane
    assert world.bridge is not None
    groups = SimpleNamespace(
        rank=world.rank,
        world_size=world.world_size,
        dp_rank=world.rank,
        dp_size=world.world_size,
        is_last_stage=True,
        is_first_copy=True,
    )
    weights = [("weight", torch.zeros(8))]
    policy = SimpleNamespace(groups=groups, iterate_hf_weights=lambda: iter(weights))
    probe = Sequences([np.ones(1, np.int32)], [np.ones(1, np.int32)])
    # The engine's log-probs are 0 too.
    generation_module.score_probe = lambda *_: [np.zeros(1, np.float32)]
    generation = GenerationRanks(
        config=config,
        bridge=world.bridge,
        policy=cast(Any, policy),
        attempt=cast(Any, Unattended(leads=world.rank == 0)),
        stopwatch=Stopwatch(),
        gloo_group=world.gloo_group,
        source_state=make_source().state_dict(),
        next_step=0,
    )

    def sync(version: int) -> None:
        if generation.sync(probe, policy_version=version) is not None:
            lane.sync.append((lane.now() - SYNC_S, lane.now()))
        generation.sample_ahead()

    sync(0)
    for step in range(config.run.num_steps):
        collected = generation.collect(step)
        assert collected is not None
        batch = generation.bring_tokens(make_batch(collected.facts, config.objective.resolve()))
        num_tokens = num_learned(batch.facts)
        trainer.learn(num_tokens)
        sync(step + 1)
        idle = generation.stopwatch.notes["perf/rollout_idle_share"]
        trainer.log(collected.metrics | {"perf/rollout_idle_share": idle}, num_tokens)
    generation.close()


def main() -> None:
    """Run the schedules one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--speed", type=float, default=80, help="modelled seconds in a second")
    parser.add_argument("--training", choices=TRAINING_S, default="light")
    parser.add_argument("--output", type=Path, help="JSON for tail_report.py")
    arguments = parser.parse_args()
    os.environ["PYTEST_TIMEOUT"] = "3600"  # of one schedule; read with the next import
    from tests.dist import run_sides

    setting = Setting(
        arguments.speed, TRAINING_S[arguments.training], arguments.steps, first_step=4
    )
    found: dict[str, Any] = {"setting": asdict(setting), "schedules": {}}
    for name in arguments.only:
        schedule = SCHEDULES[name]
        num_generation = schedule.generation_ranks
        num_training = NUM_RANKS - num_generation
        start_s = time.monotonic()
        lanes = run_sides(run_rank, num_training, num_generation, setting, schedule, start_s)
        found["schedules"][name] = {
            "schedule": asdict(schedule),
            "lanes": [asdict(lane) for lane in lanes],
        }
        print(name, flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
