"""Respelled answers stay correct, and near misses wrong: many seeded pairs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gapo_megatron.config import RewardConfig
from gapo_megatron.rewards import math, start_pool
from gapo_megatron.types import Outcome, Verdict
from tests.math_respellings import KINDS, Pair, pairs
from tests.math_rules import RULES, ruled_pairs


def test_every_kind_of_pair_is_judged_as_it_was_made():
    made = list(pairs(4 * len(KINDS), seed=0))
    verdicts = [math.verify(f"So $\\boxed{{{one.given}}}$.", one.reference) for one in made]
    assert _misjudged(made, verdicts) == {}


@pytest.mark.system
@pytest.mark.timeout(600)
def test_thousands_of_pairs_are_judged_as_they_were_made():
    made = list(pairs(2_400, seed=1))
    assert _misjudged(made, _judged(made)) == {}


def test_respellings_by_rules_of_notation_are_judged_as_they_were_made():
    made = list(ruled_pairs(200, seed=0))
    verdicts = [math.verify(f"So $\\boxed{{{one.given}}}$.", one.reference) for one in made]
    assert {one.kind for one in made} == {rule.__name__.strip("_") for rule in RULES}
    assert _misjudged(made, verdicts) == {}


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_thousands_of_respellings_by_rules_are_judged_as_they_were_made(seed):
    made = list(ruled_pairs(4_000, seed=seed))
    assert _misjudged(made, _judged(made)) == {}


def _judged(made: list[Pair]) -> list[Verdict]:
    with start_pool(RewardConfig(kind="math", timeout_s=60), num_workers=2) as pool:
        return pool.judge([(f"So $\\boxed{{{one.given}}}$.", one.reference) for one in made])


def _misjudged(made: Iterable[Pair], verdicts: Iterable[Verdict]) -> dict[Pair, str]:
    """Wrong verdicts, and unknown ones except for words on no list."""
    return {
        pair: verdict.outcome.value
        for pair, verdict in zip(made, verdicts, strict=True)
        if verdict.outcome is not (Outcome.CORRECT if pair.is_equal else Outcome.WRONG)
        and (pair.is_equal or "on no list" not in verdict.reason)
    }
