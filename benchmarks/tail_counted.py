"""Schedules of `benchmarks/tail.py` by a counted clock: the engines' own time, and nothing else.

    python benchmarks/tail_counted.py --steps 30

Nobody sleeps: eight engines are threads of one process, and a generation takes as long as the
slowest of them counts. Colocated schedules, training of the light setting.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from benchmarks.tail import SCHEDULES, carry, num_learned
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
    Schedule,
    Unattended,
    engine_costs,
    make_config,
    make_source,
)
from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.rollout.rollouter import Rollouter
from tests.scripted_engine import ThreadReplicas
from tests.timed_engine import CountedPace, TimedEngine

FIRST_STEP = 6


def run_rank(
    schedule: Schedule, num_steps: int, replicas: ThreadReplicas
) -> list[tuple[float, int, int]]:
    """Per step: seconds of this rank's engine, tokens learned from, tokens scored to carry them."""
    config, pace, tokenizer = make_config(schedule, num_steps), CountedPace(), None
    engine = TimedEngine(
        LENGTHS, engine_costs(), pace, replicas=replicas, max_sequence_tokens=2 * LIMIT
    )
    found = []
    with rewards.start_pool(config.reward, num_workers=1) as pool:
        rollouter = Rollouter(engine, make_source(), pool, tokenizer, config, environment=Guess())
        attempt = Unattended(leads=False)
        for step in range(num_steps):
            begin = pace.seconds
            sampled = rollouter.collect(step, attempt=attempt, stopwatch=Stopwatch())
            assert sampled is not None
            rollouter.open_groups, num_scored = carry(rollouter.open_groups, step)
            found.append((pace.seconds - begin, num_learned(sampled.facts), UNIT * num_scored))
    return found


def main() -> None:
    """Print a line for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    plain = 0.0
    for name in ("plain", "partial_2", "partial_3", "partial_4"):
        with ThreadPoolExecutor(NUM_RANKS) as executor:
            ranks = executor.map(
                lambda replicas, name=name: run_rank(SCHEDULES[name], arguments.steps, replicas),
                ThreadReplicas.of(NUM_RANKS, size=1),
            )
            steps = list(zip(*ranks, strict=True))[FIRST_STEP:]
        slowest = mean(max(seconds for seconds, _, _ in step) for step in steps)
        middle = mean(seconds for step in steps for seconds, _, _ in step)
        num_tokens = mean(step[0][1] for step in steps)
        num_passed = num_tokens + FORWARD_SHARE * mean(step[0][2] for step in steps)
        training_s = TRAINING_S["light"] * num_passed / MEAN_STEP_TOKENS
        rate = num_tokens / (slowest + training_s + SYNC_S)
        plain = plain or rate
        print(
            f"{name}: slowest engine {slowest:.0f} s, mean engine {middle:.0f} s, training "
            f"{training_s:.0f} s, {rate:,.0f} tokens/s, {rate / plain:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
