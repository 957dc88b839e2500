"""No answer that a policy finds without the value is correct: seeded pairs of many kinds."""

from __future__ import annotations

import pytest

from gapo_megatron.config import RewardConfig
from gapo_megatron.rewards import math, start_pool
from gapo_megatron.types import Outcome, Verdict
from tests.math_guesses import DATA, KINDS, guesses, references
from tests.math_pairs import Pair


def test_no_guess_is_correct():
    made = list(guesses(3 * len(KINDS), seed=0))
    verdicts = [math.verify(f"So $\\boxed{{{one.given}}}$.", one.reference) for one in made]
    assert {one.kind for one in made} == set(KINDS)
    assert _correct(made, verdicts) == []


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "seed"),
    [
        (2_000, 1),
        pytest.param(20_000, 2, marks=pytest.mark.soak),
        pytest.param(20_000, 3, marks=pytest.mark.soak),
    ],
)
def test_none_of_thousands_of_guesses_is_correct(count, seed):
    most, few = (200, {}) if DATA.is_dir() else (60, {"number": 52, "expression": 57})
    sizes = {kind: len(found) for kind, found in references(seed=seed, most=most).items()}
    assert sizes == {kind: few.get(kind, most) for kind in sizes}
    made = list(guesses(count, seed=seed))
    with start_pool(RewardConfig(kind="math", timeout_s=60), num_workers=2) as pool:
        verdicts = pool.judge([(f"So $\\boxed{{{one.given}}}$.", one.reference) for one in made])
    assert _correct(made, verdicts) == []


def _correct(made: list[Pair], verdicts: list[Verdict]) -> list[Pair]:
    return [p for p, v in zip(made, verdicts, strict=True) if v.outcome is Outcome.CORRECT]
