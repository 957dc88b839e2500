"""A curriculum by pass rate: its rule, a simulated learner, returned problems, the stored state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gapo_megatron.config import Config, DataSource
from gapo_megatron.data.curriculum import MEMORY, PRIOR, check_strata
from gapo_megatron.data.source import PromptSource
from gapo_megatron.errors import CheckpointError, ConfigError, DataError
from gapo_megatron.types import Prompt
from tests.configs import config_of
from tests.messages import mentions

K = 8
STRENGTH = 0.8
UNKNOWN = float("nan")


def problems(source: str = "", **counts: int) -> list[Prompt]:
    """Problems of levels, as many of each as given."""
    prefix = f"{source}/" if source else ""
    return [
        Prompt(f"{prefix}{level}-{i}", (i,), "", level, source=source)
        for level, count in counts.items()
        for i in range(count)
    ]


def curriculum(prompts: list[Prompt], **settings: Any) -> PromptSource:
    return PromptSource(prompts, **{"seed": 0, "curriculum": STRENGTH, **settings})


def see(source: PromptSource, groups: Mapping[str, list[list[float]]], step: int = 0) -> Any:
    """Show verdicts by level, each on the level's first problem; returns the metrics."""
    first = {one.level: i for i, one in reversed([*enumerate(source.problems)])}
    numbers = [first[level] for level, some in groups.items() for _ in some]
    rewards = np.array([one for some in groups.values() for one in some])
    return source.observe(numbers, rewards, rewards == 1, step=step)


def shares(source: PromptSource, step: int = 0) -> dict[str, float]:
    """Shares of the next step, by stratum."""
    metrics = see(source, {source.problems[0].level: [[UNKNOWN, UNKNOWN]]}, step)
    return {
        key.removeprefix("curriculum/").removesuffix("/share"): value
        for key, value in metrics.items()
        if key.endswith("/share")
    }


def by_level(batch: list[Prompt]) -> Counter[str]:
    return Counter(one.level for one in batch)


class Learner:
    """Solves a problem of a level with the level's probability."""

    def __init__(self, source: PromptSource, **rates: float) -> None:
        self.source, self.rates, self.step = source, rates, 0
        self.random = np.random.default_rng(3)

    def learn(self, num_prompts: int = 16, num_late: int = 0) -> Counter[str]:
        """A step; returns the problems that it keeps by level."""
        drawn = self.source.next_batch(num_prompts, step=self.step)
        kept, late = drawn[num_late:], drawn[:num_late]
        self.source.give_back(late, step=self.step)
        rates = np.array([[self.rates[one.level]] for one in kept])
        rewards = (self.random.random((len(kept), K)) < rates).astype(float)
        numbers = [self.source.number_of(one.id) for one in kept]
        self.metrics = self.source.observe(numbers, rewards, rewards == 1, step=self.step)
        self.step += 1
        return by_level(kept)


def test_the_shares_are_those_of_the_rule() -> None:
    """Worked out by hand, for levels of different sizes."""
    source = curriculum(problems(a=30, b=10))
    assert shares(source) == {"a": 0.75, "b": 0.25}
    see(source, {"a": [[1, 1, 1, 1], [1, 1, 0, 0]], "b": [[1, 0, 0, 0]] * 2})
    # c (k - c) / (k (k - 1)) of each group, and of the four together.
    of_a, of_b = (0 + 2 * 2 / 12) / 2, 3 / 12
    mean = (of_a + of_b) / 2
    a, b = ((2 * one + PRIOR * mean) / (2 + PRIOR) for one in (of_a, of_b))
    middle = 0.75 * a + 0.25 * b
    expected = {"a": 0.75 * (0.2 + 0.8 * a / middle), "b": 0.25 * (0.2 + 0.8 * b / middle)}
    assert shares(source) == pytest.approx(expected) and sum(expected.values()) == pytest.approx(1)
    metrics = see(source, {"a": [[UNKNOWN] * 4]})
    assert metrics["curriculum/a/pass_rate"] == 0.75 and metrics["curriculum/b/pass_rate"] == 0.25
    assert metrics["curriculum/b/learnability"] == of_b


def test_the_learnable_level_grows_and_none_starves() -> None:
    """And once it has been learned, the next one takes its place: every estimate recovers."""
    source = curriculum(problems(easy=300, middle=300, hard=300))
    learner = Learner(source, easy=0.99, middle=0.5, hard=0.01)
    first = learner.learn(15)
    assert first == {"easy": 5, "middle": 5, "hard": 5}
    for _ in range(20):
        learner.learn()
    counts = sum((learner.learn() for _ in range(20)), Counter[str]())
    assert counts["middle"] > 0.7 * counts.total()
    assert min(counts.values()) > 0.05 * counts.total()
    assert abs(learner.metrics["curriculum/middle/pass_rate"] - 0.5) < 0.15
    learner.rates |= {"middle": 0.99, "hard": 0.5}
    for _ in range(60):
        learner.learn()
    counts = sum((learner.learn() for _ in range(20)), Counter[str]())
    assert counts["hard"] > 0.7 * counts.total() and min(counts.values()) > 0.05 * counts.total()


def test_a_level_of_solved_and_hopeless_problems_teaches_nothing() -> None:
    """Its pass rate is that of the most learnable level."""
    source = curriculum(problems(split=50, mixed=50))
    for _ in range(4):
        see(source, {"split": [[1.0] * K, [0.0] * K] * 4, "mixed": [[1.0, 0.0] * (K // 2)] * 8})
    metrics = see(source, {"split": [[UNKNOWN] * K]})
    assert metrics["curriculum/split/pass_rate"] == metrics["curriculum/mixed/pass_rate"] == 0.5
    assert metrics["curriculum/split/share"] < 0.25
    # Each still has its part of what does not follow the curriculum.
    assert metrics["curriculum/split/share"] > 0.5 * (1 - STRENGTH)


def test_an_unknown_verdict_is_no_wrong_one() -> None:
    known, unknown = curriculum(problems(a=9, b=9)), curriculum(problems(a=9, b=9))
    see(known, {"a": [[1, 0, 1]], "b": [[1, 1, 1]]})
    nothing = [[1, *[UNKNOWN] * 4], [UNKNOWN] * 5]
    see(unknown, {"a": [[1, UNKNOWN, 0, UNKNOWN, 1], *nothing], "b": [[1, 1, UNKNOWN, UNKNOWN, 1]]})
    assert unknown.state_dict() == known.state_dict()
    assert shares(unknown)["a"] > 0.5


def test_what_grades_teach_is_their_variance() -> None:
    """No response is correct, and one level's grades differ all the same."""
    source = curriculum(problems(flat=9, graded=9))
    for _ in range(3):
        see(source, {"flat": [[0.4] * 4] * 4, "graded": [[0.1, 0.3, 0.1, 0.3]] * 4})
    metrics = see(source, {"flat": [[UNKNOWN] * 4]})
    assert metrics["curriculum/graded/learnability"] == pytest.approx(0.04 / 3)
    assert metrics["curriculum/graded/pass_rate"] == 0 < metrics["curriculum/graded/share"] - 0.7


def test_an_estimate_remembers_the_last_groups() -> None:
    """However many a step brings: an old one is forgotten as fast."""
    for num_steps, num_groups in ((MEMORY, 1), (4, MEMORY // 4), (1, 3 * MEMORY)):
        source = curriculum(problems(a=9, b=9))
        see(source, {"a": [[1.0, 1.0]] * MEMORY})
        for _ in range(num_steps):
            see(source, {"a": [[0.0, 0.0]] * num_groups})
        metrics = see(source, {"a": [[UNKNOWN] * 2]})
        assert metrics["curriculum/a/pass_rate"] < 0.4
    assert metrics["curriculum/a/pass_rate"] == 0


def test_the_order_of_the_groups_changes_no_bit() -> None:
    """So that neither the number of engines nor the ranks do."""
    random = np.random.default_rng(0)
    states = set()
    numbers = random.integers(0, 40, size=60)
    rewards = random.random((60, K))
    for _ in range(4):
        source, order = curriculum(problems(a=20, b=20)), random.permutation(60)
        source.observe(numbers[order].tolist(), rewards[order], rewards[order] > 0.5, step=0)
        states.add(json.dumps(source.state_dict()))
    assert len(states) == 1


def test_sources_keep_their_weights_and_steps() -> None:
    prompts = [*problems("x", low=30, high=10), *problems("y", low=40)]
    given = (
        DataSource(name="x", path="x", weight=3.0),
        DataSource(name="y", path="y", first_step=1),
    )
    source = curriculum(prompts, sources=given)
    assert shares(source, 0) == {"x/low": 0.75, "x/high": 0.25}
    expected = {"x/low": 3 / 4 * 3 / 4, "x/high": 3 / 4 / 4, "y/low": 1 / 4}
    assert shares(source, 1) == pytest.approx(expected)
    assert source.names == ["x", "y"]
    batches = [source.next_batch(8, step=step) for step in (0, 0, 1, 1)]
    assert [one.source for one in batches[0] + batches[1]] == ["x"] * 16
    assert Counter(one.source for one in batches[2] + batches[3]) == {"x": 12, "y": 4}


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_resume_continues_exactly(taken: int) -> None:
    """With problems given back, from a state that was JSON."""
    prompts = problems(easy=30, middle=7, hard=30)
    learner = Learner(curriculum(prompts), easy=0.9, middle=0.5, hard=0.1)
    for _ in range(taken):
        learner.learn(12, num_late=3)
    resumed = curriculum(prompts)
    resumed.load_state_dict(json.loads(json.dumps(learner.source.state_dict())))
    again = Learner(resumed, **learner.rates)
    again.step, again.random = learner.step, np.random.default_rng(8)
    learner.random = np.random.default_rng(8)
    for _ in range(30):
        assert again.learn(12, num_late=3) == learner.learn(12, num_late=3)
        assert again.metrics == learner.metrics
    assert json.dumps(resumed.state_dict()) == json.dumps(learner.source.state_dict())


def test_shares_are_those_of_kept_problems() -> None:
    """Problems of one level are always given back."""
    source, kept = curriculum(problems(a=50, b=50)), Counter[str]()
    see(source, {"a": [[1.0] * K] * 20, "b": [[1.0, 0.0] * (K // 2)] * 20})
    wanted = shares(source)
    for step in range(100):
        drawn = source.next_batch(12, step=step)
        late = [one for one in drawn if one.level == "b"][:3]
        source.give_back(late, step=step)
        kept += by_level([one for one in drawn if one not in late])
    assert {level: count / 900 for level, count in kept.items()} == pytest.approx(wanted, abs=0.01)


def test_a_small_level_gives_what_it_has_and_owes_nothing() -> None:
    """Otherwise it would be drawn whole for many steps after it has been learned."""
    source = curriculum(problems(big=100, small=3))
    see(source, {"big": [[1.0] * K] * 40, "small": [[1.0, 0.0] * (K // 2)] * 40})
    for _ in range(50):
        drawn = source.next_batch(20)
        assert by_level(drawn) == {"big": 17, "small": 3} and len({*drawn_ids(drawn)}) == 20
    see(source, {"big": [[1.0, 0.0] * (K // 2)] * 40, "small": [[1.0] * K] * 40})
    total = sum((by_level(source.next_batch(20)) for _ in range(10)), Counter[str]())
    assert total["small"] <= 3


def drawn_ids(batch: list[Prompt]) -> list[str]:
    return [one.id for one in batch]


def test_a_state_with_a_curriculum_is_refused_without_one_and_the_other_way_round() -> None:
    prompts = problems(a=9, b=9)
    sources = (curriculum(prompts), PromptSource(prompts, seed=0))
    for one, other in (sources, reversed(sources)):
        with pytest.raises(CheckpointError, match=mentions("data.curriculum", "run.output_dir")):
            one.load_state_dict(other.state_dict())
    moved = [replace(one, level="b") if one.id == "a-8" else one for one in prompts]
    with pytest.raises(CheckpointError, match="the rows"):
        curriculum(moved).load_state_dict(sources[0].state_dict())
    PromptSource(moved, seed=0).load_state_dict(sources[1].state_dict())
    curriculum(prompts, curriculum=0.3).load_state_dict(sources[0].state_dict())


def config(**data: Any) -> Config:
    return config_of({"data": data})


@pytest.mark.parametrize("value", [0, 1, -0.5, "on", True])
def test_a_curriculum_is_a_part_of_the_prompts(value: Any) -> None:
    with pytest.raises(ConfigError, match=mentions("data.curriculum", value)):
        config(curriculum=value)


def test_a_curriculum_needs_strata() -> None:
    data = config(curriculum=0.5).data
    check_strata({"a": 1, "b": 1}, data)
    for counts in ({"only": 9}, {f"level {i}": 1 for i in range(257)}):
        named = (
            "data.curriculum (0.5)",
            "2 to 256",
            len(counts),
            data.train_path,
            next(iter(counts)),
        )
        with pytest.raises(DataError, match=mentions(*named)):
            check_strata(counts, data)
        check_strata(counts, config().data)
