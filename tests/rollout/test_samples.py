"""The few responses of a step that are kept as text: which ones, and what is said of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from gapo_megatron.config import Config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.samples import NUM_WITHOUT_SIGNAL, choose_rows, kept_rows
from gapo_megatron.run.start import build_rollouter
from gapo_megatron.types import Outcome, Prompt, Sample, Verdict
from tests.acting import one_turn_inputs
from tests.learn_setup import GROUP_SIZE
from tests.rollout.test_sample import (
    InstantPool,
    Numbered,
    Setup,
    config_of,
    length_of,
    with_verdicts,
)
from tests.scripted_engine import LoneReplicas, ThreadReplicas

SAME_C = {0: (2,), 1: (0, 3), 8: (1,)}
"""Groups by their c."""
TOKENIZER: Any = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))


class TalkingPool(InstantPool):
    """Says which response it has judged, and grades it."""

    def submit(self, items: Iterable[tuple[Any, ...]]) -> list[int]:
        items = [*items]
        numbers = super().submit(items)
        for number, (problem, sample, *_) in zip(numbers, items, strict=True):
            verdict = Verdict(self.judged[number].outcome, f"{problem}/{sample}", int(problem) / 8)
            self.judged[number] = verdict
        return numbers


class WrongPool(InstantPool):
    def submit(self, items: Iterable[tuple[Any, ...]]) -> list[int]:
        numbers = super().submit(items)
        for number in numbers:
            self.judged[number] = Verdict(Outcome.WRONG)
        return numbers


def setup_of(
    config: Config, *, pool: InstantPool | None = None, replicas: Replicas | None = None
) -> Setup:
    problems = [
        Prompt(str(i), (50, i), f"{i} \ud800" + 10**6 * "x", source=f"file {i % 2}")
        for i in range(12)
    ]
    setup = Setup(config, replicas=replicas)
    setup.pool = pool or TalkingPool()
    inputs = one_turn_inputs(PromptSource(problems, seed=0), TOKENIZER)
    inputs.environment = Numbered(TOKENIZER)
    judging: Any = setup.pool
    setup.rollouter = build_rollouter(config, inputs, setup.engine, judging)
    return setup


def config_with(samples_per_step: int, **batch: Any) -> Config:
    config = config_of(9, **batch)
    metrics = config.metrics.model_copy(update={"samples_per_step": samples_per_step})
    return config.model_copy(update={"metrics": metrics})


def samples_of(setup: Setup, step: int = 2) -> list[Sample]:
    return list(setup.collect(step).samples)


@pytest.mark.parametrize("step", range(6))
def test_samples_spread_over_c_first_and_over_verdicts_then(step: int) -> None:
    groups = ["wwww", "wwww", "cwww", "wwww", "wcww", "ccwu", "cccc"]  # c = 0, 0, 1, 0, 1, 2, 4
    rollouts = with_verdicts(*groups)
    letters = "".join(groups)

    def kinds(number: int) -> list[tuple[int, str]]:
        rows = choose_rows(rollouts, number, step=step)
        assert rows == sorted({*rows}) and len(rows) == min(number, len(letters))
        return [(groups[row // 4].count("c"), letters[row]) for row in rows]

    assert len({c for c, _ in kinds(3)}) == 3
    # Whole groups as far as they fit, of one c each; of the rest again as many c as possible.
    for number in (4, 7, 16, 18):
        chosen = Counter(row // 4 for row in choose_rows(rollouts, number, step=step))
        whole = [group for group, count in chosen.items() if count == 4]
        assert len(whole) == number // 4
        assert len({groups[one].count("c") for one in whole}) == len(whole)
        others = [groups[one].count("c") for one in chosen.keys() - {*whole}]
        assert len(others) == number % 4 == len({*others})
    # Without whole groups (as large as all): the second of a c has another verdict, if it can.
    wide = with_verdicts("w" * 13 + "cuu", "c" * 8 + "w" * 8, "w" * 16, "c" + "w" * 15)
    rows = choose_rows(wide, 8, step=step)
    eight = [(row // 16, int(wide.table["outcome"][row])) for row in rows]
    of_c = {c: [code for group, code in eight if group in found] for c, found in SAME_C.items()}
    assert sorted(map(len, of_c.values())) == [2, 3, 3]
    assert all(len({*of_c[c]}) > 1 for c in (1, 8))
    assert {group for group, _ in eight} >= {1, 2}
    assert len(kinds(1000)) == len(letters) and kinds(0) == []


def test_groups_with_and_without_unknown_verdicts_take_turns() -> None:
    rollouts = with_verdicts("cwww", "cwww", "cwuw", "cwww")
    found = [choose_rows(rollouts, 8, step=step) for step in range(4)]
    assert all({row // 4 for row in rows} == {0, 2} for rows in found)
    assert {choose_rows(rollouts, 4, step=step)[0] // 4 for step in range(4)} == {0, 2}


def test_all_are_all_of_the_step() -> None:
    rollouts = with_verdicts("cwww", "wwww", "cwuw")
    assert kept_rows(rollouts, "all", step=3) == [*range(12)]
    assert kept_rows(rollouts, 4, step=0) == choose_rows(rollouts, 4, step=0)
    silent = with_verdicts("wwww", "cccc")
    assert len(kept_rows(silent, 1, step=0)) == NUM_WITHOUT_SIGNAL


def test_few_samples_show_every_c_and_verdict_over_the_steps() -> None:
    rollouts = with_verdicts("wwww", "cwww", "ccww", "cccw", "cccc")
    found = {
        (row // 4, "wrong" if row % 4 >= row // 4 else "correct")
        for step in range(10)
        for row in choose_rows(rollouts, 1, step=step)
    }
    mixed = {(c, verdict) for c in (1, 2, 3) for verdict in ("correct", "wrong")}
    assert found == {(0, "wrong"), *mixed, (4, "correct")}


def test_every_rank_has_the_same_samples_with_the_reasons_of_their_verdicts() -> None:
    """Two ranks in each of two engines: a response is judged by one of them."""
    setups = [
        setup_of(config_with(64), replicas=replicas) for replicas in ThreadReplicas.of(4, size=2)
    ]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(samples_of, setups))
    alone = samples_of(setup_of(config_with(64), replicas=LoneReplicas()))
    assert len(alone) == 9 * GROUP_SIZE and found == [alone] * 4
    assert [one.c for one in alone] == sorted(one.c for one in alone)
    assert {one.c for one in alone} == {0, 1}
    assert {one.verdict for one in alone} == {"correct", "wrong"}
    for one in alone:
        number = int(one.problem)
        assert one.reason == f"{number}/{one.sample}"
        assert one.verdict == ("correct" if one.sample == 0 and number % 3 else "wrong")
        assert one.grade == number / 8
        assert (one.c, one.k) == (int(number % 3 > 0), GROUP_SIZE)
        assert one.num_tokens == length_of(one.problem, one.sample)
        assert one.prompt == f"50 {number}" and one.source == f"file {number % 2}"
        assert one.response == " ".join(["2"] * one.num_tokens)
        # No megabytes, and nothing that a reader of JSON refuses.
        assert one.answer.startswith(f"{number} ?") and len(one.answer) < 10**4


def test_a_response_that_leaves_its_group_says_why() -> None:
    config = config_with(64)
    rollout = config.rollout.model_copy(update={"max_response_tokens": 6})
    reward = config.reward.model_copy(update={"truncated": "unknown"})
    setup = setup_of(config.model_copy(update={"rollout": rollout, "reward": reward}))
    sampled = setup.collect(2)
    samples = sampled.samples
    assert not sampled.timelines  # of no environment
    long = [one for one in samples if length_of(one.problem, one.sample) > 6]
    assert long and {(one.verdict, one.reason) for one in long} == {("unknown", "truncated")}
    assert all(one.truncated == (one in long) for one in samples)
    assert all(one.reason == f"{one.problem}/{one.sample}" for one in samples if one not in long)
    # What is left out says nothing of the verifier, and has no reward.
    known = [one.verdict == "correct" for one in samples if one not in long]
    assert sampled.metrics["reward/unknown_share"] == 0
    assert sampled.metrics["reward/mean"] == sum(known) / len(known)
    assert sampled.metrics["rollout/truncated"] == len(long) / len(samples)


def test_a_step_without_signal_has_samples_to_show_anyway() -> None:
    assert samples_of(setup_of(config_with(0))) == []
    silent = setup_of(config_with(0), pool=WrongPool())
    assert len(samples_of(silent)) == NUM_WITHOUT_SIGNAL
