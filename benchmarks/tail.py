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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.tail_setting import (
    FORWARD_SHARE,
    LENGTHS,
    LIMIT,
    MEAN_STEP_TOKENS,
    NUM_RANKS,
    SYNC_S,
    TRAINING_S,
    UNIT,
    Guess,
    Lane,
    Schedule,
    Setting,
    Unattended,
    engine_costs,
    make_config,
    make_source,
)
from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.facts import Facts, Spread
from gapo_megatron.objective import make_batch
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.rollouter import Rollouter, Sampled
from gapo_megatron.run import bridge as bridge_module
from gapo_megatron.run import generation_ranks as generation_module
from gapo_megatron.run.generation_ranks import GenerationRanks
from gapo_megatron.run.generation_side import GenerationSide
from gapo_megatron.run.process_group import World
from gapo_megatron.types import Sequences
from tests.timed_engine import Pace, TimedEngine

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
