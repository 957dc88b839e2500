"""The verifier of word problems."""

from __future__ import annotations

import pytest

from gapo_megatron.rewards.number import check_answer, verify
from gapo_megatron.types import Outcome


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12", "12"),
        ("Mia has 7 + 5 = 12 stamps.", "12"),
        ("12 - that is all", "12"),
        ("15-6=9", "9"),
        ("It is 9-4", "4"),  # a difference: no minus 4
        ("The answer is -4.", "-4"),
        ("(7 + 5) = 1,012.0", "1012"),
        ("$3.50", "3.5"),
    ],
)
def test_the_last_number_is_the_answer(response, answer):
    assert verify(response, answer).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "no number"),
        ("twelve", "no number"),
        ("12 stamps and 1 more", "last number is 1,"),
        ("112", "112"),
        ("12.5", "12.5"),
        ("-12", "-12"),
    ],
)
def test_any_other_is_wrong_with_its_reason(response, reason):
    verdict = verify(response, "12")
    assert verdict.outcome is Outcome.WRONG
    assert reason in verdict.reason


@pytest.mark.parametrize("answer", ["twelve", "", "12 apples", "1 2"])
def test_an_answer_that_is_no_number_is_refused(answer):
    with pytest.raises(ValueError, match="must be a number"):
        check_answer(answer)
