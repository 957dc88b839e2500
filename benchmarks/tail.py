"""What waiting for the longest responses costs, and what each schedule gains, by a counted clock.

    python benchmarks/tail.py                            every schedule, training 26 % of a step
    python benchmarks/tail.py --training light --only plain partial_3
    python benchmarks/tail.py --no-tail                  all responses have the mean length

The package's own rollouts (`Rollouter`, `generate`, verdicts) run on engines that compute nothing
and count as many seconds as the planner says that decoding takes (`timed_engine.py`). Engines
are threads of one process and nobody sleeps: the figures are those of the schedules alone, the same
in every run. Training, sync and who waits for whom are arithmetic (`step_s`).

The setting is the one in which verl publishes its schedules (docs/advance/v1_async_trainer.md):
64 prompts x 8 responses, up to 32,768 tokens, 12,720 on average, 35 billion parameters of which 3
are active, eight ranks, each an engine of 4 H100.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

import numpy as np

from benchmarks.timed_engine import Costs, CountedPace, Lengths, TimedEngine
from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config, load_config, parse_config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.rollout import generate
from gapo_megatron.run.start import build_rollouter
from gapo_megatron.types import Prompt
from gapo_tools.planner.engine import Decoding
from gapo_tools.planner.flops import Shape, element_bytes
from gapo_tools.planner.hardware import GPUS, Efficiency
from gapo_tools.planner.plans import read_model
from tests.acting import one_turn_inputs
from tests.scripted_engine import ThreadReplicas

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_RANKS, NUM_PROMPTS, GROUP_SIZE = 8, 64, 8
LIMIT, PROMPT_TOKENS = 32_768, 200
MEAN_TOKENS = 12_720
UNIT = 64
"""Tokens that one token of these engines stands for: 512 decoding steps, not 32,768."""
LENGTHS = Lengths(median=10_480 / UNIT, spread=0.7)
"""The planner's default spread; 12,720 on average, 5 % of the responses at the limit."""
NO_TAIL = Lengths(median=MEAN_TOKENS / UNIT, spread=0.0)
"""All responses have that length."""
SYNC_S = 9.9
"""The planner's, for this model and these GPUs."""
TRAINING_S = {"light": 26.0, "heavy": 207.0}
"""Training on a batch of mean length on all ranks. Light: the planner's, for this model and these
GPUs. Heavy: 26 % of a plain step, as verl has it for a dense model on 128 H20."""
MEAN_STEP_TOKENS = NUM_PROMPTS * GROUP_SIZE * MEAN_TOKENS
FORWARD_SHARE = 2 / 7.5
"""Of a token's training a forward pass: 6 parts update, 2 old log-probs of three mini-batches in
four."""
FIRST_STEP = 6
"""First step that counts: partial rollouts take some to fill up."""


@dataclass(frozen=True)
class Schedule:
    """How generation and training share the ranks."""

    oversampling: float = 1.0
    partial_rollouts: bool = False
    generation_ranks: int = 0
    max_staleness: int = 0


def _partial(oversampling: float, generation_ranks: int = 0, max_staleness: int = 0) -> Schedule:
    return Schedule(oversampling, True, generation_ranks, max_staleness)


SCHEDULES = {
    "plain": Schedule(),
    "partial_2": _partial(2),
    "partial_3": _partial(3),
    "nodes_4_stale_1": Schedule(1, False, 4, 1),
    "nodes_5_stale_1": Schedule(1, False, 5, 1),
    "nodes_4_stale_0_partial_2": _partial(2, 4, 0),
    "nodes_4_stale_1_partial_2": _partial(2, 4, 1),
    "nodes_4_stale_1_partial_3": _partial(3, 4, 1),
    "nodes_3_stale_1_partial_1.5": _partial(1.5, 3, 1),
    "nodes_3_stale_1_partial_2": _partial(2, 3, 1),
    "nodes_3_stale_1_partial_3": _partial(3, 3, 1),
    "nodes_3_stale_1_partial_4": _partial(4, 3, 1),
    "nodes_3_stale_1_partial_5": _partial(5, 3, 1),
    "nodes_3_stale_1_partial_6": _partial(6, 3, 1),
    "nodes_2_stale_1_partial_2": _partial(2, 2, 1),
}


@dataclass(frozen=True)
class Batch:
    """One batch, as one engine has it."""

    takes: tuple[float, ...]
    """Modelled seconds of this engine's decoding steps."""
    num_tokens: int
    """Tokens that are learned from."""
    num_scored: int
    """Tokens of open groups that the trainer scores to carry them."""
    oldest_gap: float
    """Steps between the sampling of the oldest token and the end of the batch."""


@dataclass(frozen=True)
class Setting:
    """What all schedules of a table share."""

    num_steps: int
    num_places: int
    """Requests that an engine runs at a time."""
    lengths: Lengths
    training_s: float


def engine_of(replicas: ThreadReplicas, pace: CountedPace, setting: Setting) -> TimedEngine:
    """Qwen3-30B-A3B on 4 H100 as the planner has it; UNIT of its decoding steps are one here."""
    config = load_config(REPOSITORY / "configs/qwen3_30b_a3b/h100_24k.toml")
    hf_config, _ = read_model(config)
    shape, gpu, efficiency = Shape.of(hf_config), GPUS["h100"], Efficiency()
    tp_size, num_bytes = config.rollout.tensor_parallel_size, element_bytes(config)
    flops = gpu.flops("bf16")
    decoding = Decoding(shape, tp_size, num_bytes, flops, gpu, efficiency)

    def step_s(count: int, mean_tokens: float) -> float:
        return UNIT * float(decoding.step_s(np.array([count]), np.array([UNIT * mean_tokens]))[0])

    products = 2 * (shape.active_weights + shape.head_weights)
    speed = tp_size * flops * efficiency.matmul
    costs = Costs(step_s, prefill_token_s=UNIT * products / speed)
    return TimedEngine(
        setting.lengths,
        costs,
        pace,
        replicas=replicas,
        max_sequence_tokens=2 * LIMIT,
        num_places=setting.num_places,
    )


def make_config(schedule: Schedule, num_steps: int) -> Config:
    """The settings that rollouts read."""
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
            "reward": {"kind": "exact"},
        },
        source="benchmark",
    )


class _Pace(CountedPace):
    """Keeps every time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.takes: list[float] = []

    def take(self, seconds: float) -> None:
        """Let this time pass."""
        super().take(seconds)
        self.takes.append(seconds)


class _Tokenizer:
    def decode(self, *_: object, **__: object) -> str:
        return ""


class _Unattended:
    """A run's `Attempt`: nobody asks for a stop."""

    def patience(self, _: object) -> Any:
        return lambda _: False


def run_engine(schedule: Schedule, setting: Setting, replicas: ThreadReplicas) -> list[Batch]:
    """The batches of a run on one engine; called on all of them at the same time."""
    config, pace = make_config(schedule, setting.num_steps), _Pace()
    engine, found = engine_of(replicas, pace, setting), []
    prompts = [Prompt(str(i), (1,) * (PROMPT_TOKENS // UNIT), "") for i in range(4000)]
    inputs = one_turn_inputs(PromptSource(prompts, seed=0), _Tokenizer())
    with rewards.start_pool(config.reward, num_workers=1) as pool:
        rollouter = build_rollouter(config, inputs, engine, pool)
        for step in range(setting.num_steps):
            pace.takes.clear()
            sampled = rollouter.collect(step, attempt=_Unattended(), stopwatch=Stopwatch())
            assert sampled is not None
            opened, table = rollouter.open_groups.table, sampled.table
            is_new = opened["num_response_tokens"] > opened["num_carried_tokens"]
            rollouter.open_groups = rollouter.open_groups.carried()
            found.append(
                Batch(
                    takes=tuple(pace.takes),
                    num_tokens=UNIT * int(table["num_sampled_tokens"].sum()),
                    num_scored=UNIT * int(opened["num_response_tokens"][is_new].sum()),
                    oldest_gap=float(step - table["oldest_version"].min()),
                )
            )
            engine.policy_version = step + 1
    return found


def generation_s(schedule: Schedule, engines: Sequence[Batch]) -> float:
    """Until the last engine has ended: of partial rollouts none is an interval ahead of another."""
    if not schedule.partial_rollouts:
        return max(sum(one.takes) for one in engines)
    ends = [0.0] * len(engines)
    for seconds in itertools.zip_longest(*(one.takes for one in engines), fillvalue=0.0):
        last = max(ends)
        ends = [max(end + one, last) for end, one in zip(ends, seconds, strict=True)]
    return max(ends)


def step_s(schedule: Schedule, generation_s: float, training_s: float) -> float:
    """One step: both stages in turns, or the longer of the two; then the weights."""
    if schedule.max_staleness:
        return max(generation_s, training_s) + SYNC_S
    return generation_s + training_s + SYNC_S


def row(name: str, setting: Setting) -> list[str | float]:
    """A schedule's figures, its tokens a second last."""
    schedule = SCHEDULES[name]
    num_engines = schedule.generation_ranks or NUM_RANKS
    num_trainers = NUM_RANKS - schedule.generation_ranks
    with ThreadPoolExecutor(num_engines) as executor:
        engines = executor.map(
            lambda replicas: run_engine(schedule, setting, replicas),
            ThreadReplicas.of(num_engines, size=1),
        )
        batches = list(zip(*engines, strict=True))
    slowest = [generation_s(schedule, batch) for batch in batches]
    training = []
    for first, *_ in batches:
        scored = 0 if schedule.generation_ranks else first.num_scored
        share = (first.num_tokens + FORWARD_SHARE * scored) / MEAN_STEP_TOKENS
        training.append(setting.training_s * share * NUM_RANKS / num_trainers)
    ahead = schedule.max_staleness  # a batch is learned from while a later one is sampled
    steps = range(FIRST_STEP, setting.num_steps - ahead)
    seconds = [step_s(schedule, slowest[i + ahead], training[i]) for i in steps]
    counted = [batches[i] for i in steps]
    num_tokens = mean(batch[0].num_tokens for batch in counted)
    return [
        f"`{name}`",
        f"{mean(seconds):.0f}",
        f"{mean(slowest[i] for i in steps):.0f}",
        f"{mean(sum(one.takes) for batch in counted for one in batch):.0f}",
        f"{mean(training[i] for i in steps):.0f}",
        f"{num_tokens / NUM_PROMPTS / GROUP_SIZE:,.0f}",
        f"{max(batch[0].oldest_gap for batch in counted) + ahead:.0f}",
        num_tokens / mean(seconds),
    ]


def main() -> None:
    """Print a line of the table for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--training", choices=TRAINING_S, default="heavy")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument(
        "--places", type=int, default=1024, help="requests an engine runs at a time"
    )
    parser.add_argument("--no-tail", action="store_true", help="all responses are equally long")
    arguments = parser.parse_args()
    setting = Setting(
        arguments.steps,
        arguments.places,
        NO_TAIL if arguments.no_tail else LENGTHS,
        TRAINING_S[arguments.training],
    )
    generate._STEPS_PER_QUESTION = 1  # one of these decoding steps is UNIT of an engine's
    print("| schedule | step, s | generation, s | mean engine, s | training, s |", end="")
    print(" mean length | oldest weights | tokens/s | against the first |")
    print("|" + "---|" * 9)
    first = 0.0
    for name in arguments.only:
        *cells, rate = row(name, setting)
        assert isinstance(rate, float)
        first = first or rate
        shown = [*map(str, cells), f"{rate:,.0f}", f"{rate / first:.2f}"]
        print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
