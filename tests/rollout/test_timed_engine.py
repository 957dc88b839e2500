"""The engine with simulated time, and the gain of schedules on a long tail by its clock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.data.source import PromptSource
from gapo_megatron.run.start import build_rollouter
from gapo_megatron.types import Prompt
from tests.acting import one_turn_inputs
from tests.configs import config_of
from tests.scripted_engine import LoneReplicas, ThreadReplicas
from tests.timed_engine import Costs, CountedPace, Lengths, TimedEngine

LENGTHS = Lengths(median=100, spread=0.7)
LIMIT, NUM_ENGINES, NUM_STEPS = 300, 4, 6


def make_engine(costs: Costs, **changes: object) -> tuple[TimedEngine, CountedPace]:
    pace = CountedPace()
    settings = {"replicas": LoneReplicas(), "max_sequence_tokens": 1000} | changes
    return TimedEngine(LENGTHS, costs, pace, **settings), pace


@dataclass
class Found:
    """Of one engine."""

    seconds: list[float]
    lengths: list[int]
    num_steps: list[int]
    """Decoding steps of each batch."""


def sample(oversampling: float, *, partial: bool) -> list[Found]:
    """Several steps of several engines, with generation only."""
    batch = {
        "rollout_prompts": 8 * NUM_ENGINES,
        "minibatch_prompts": 8,
        "rollouts_per_prompt": 2,
        "oversampling": oversampling,
        "partial_rollouts": partial,
    }
    rollout = {"max_response_tokens": LIMIT}
    config = config_of({"data": {"max_prompt_tokens": 16}, "batch": batch, "rollout": rollout})

    class Tokenizer:
        added_tokens_decoder: ClassVar[dict[int, object]] = {}
        all_special_ids = all_special_tokens = ()

        def decode(self, *_: object, **__: object) -> str:
            return ""

    class NeverStopped:
        def patience(self, _: object) -> object:
            return lambda _: False

    def run(replicas: ThreadReplicas, pool: rewards.Pool) -> Found:
        engine, pace = make_engine(Costs(lambda count, _: 1 + 0.01 * count), replicas=replicas)
        source = PromptSource([Prompt(str(i), (1,), "") for i in range(500)], seed=0)
        inputs = one_turn_inputs(source, Tokenizer())
        rollouter = build_rollouter(config, inputs, engine, pool)
        found = Found([], [], [])
        for step in range(NUM_STEPS):
            begin, num_before = pace.seconds, engine._num_steps
            sampled = rollouter.collect(step, attempt=NeverStopped(), stopwatch=Stopwatch())
            found.seconds.append(pace.seconds - begin)
            found.num_steps.append(engine._num_steps - num_before)
            found.lengths += sampled.table["num_sampled_tokens"].tolist()
            rollouter.open_groups = rollouter.open_groups.carried()
            engine.policy_version = step + 1
        return found

    all_replicas = ThreadReplicas.of(NUM_ENGINES, size=1)
    pools = [rewards.start_pool(config.reward, num_workers=1) for _ in all_replicas]
    try:
        with ThreadPoolExecutor(NUM_ENGINES) as executor:
            return list(executor.map(run, all_replicas, pools))
    finally:
        for pool in pools:
            pool.close()


@pytest.mark.parametrize(("stopped", "num_reports"), [(None, 4), (1, 2)])
def test_engines_end_together_or_are_aborted_together(
    stopped: int | None, num_reports: int
) -> None:
    """By the reports of an interval ago; an engine that has nothing left reports on."""

    def run(replicas: ThreadReplicas) -> tuple[int, bool]:
        tally, count = replicas.tally(wanted=5), 0
        while not tally.is_over(
            (replicas.rank + 1) * count, must_abort=replicas.rank == stopped, meanwhile=print
        ):
            count += 1
        return count, tally.is_aborted

    # Reports add up to 0, 3, 6 groups: 6 are enough, and known a report later.
    with ThreadPoolExecutor(2) as executor:
        found = [*executor.map(run, ThreadReplicas.of(2, size=1))]
    assert found == [(num_reports - 1, stopped is not None)] * 2


def test_partial_rollouts_do_not_wait_for_the_tail() -> None:
    plain, over, partial = (
        sample(1, partial=False),
        sample(1.5, partial=False),
        sample(2, partial=True),
    )

    def slowest(found: list[Found]) -> float:
        """Seconds of a step once open groups have filled up, waiting for the slowest engine."""
        steps = np.array([one.seconds for one in found])[:, 2:]
        return float(steps.max(axis=0).mean())

    assert slowest(partial) < 0.75 * slowest(plain)
    # All engines stop at the same decoding step; with a share of each they would not.
    assert all(one.num_steps == partial[0].num_steps for one in partial)
    assert all(one.num_steps != over[0].num_steps for one in over[1:])
    # What over-sampling throws away is the long ones; partial rollouts learn from them all.
    assert np.mean(over[0].lengths) < 0.9 * np.mean(plain[0].lengths)
    late = len(partial[0].lengths) // 2
    assert np.mean(partial[0].lengths[late:]) > 0.9 * np.mean(plain[0].lengths)
