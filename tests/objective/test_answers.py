"""The monitor of correct answers: new forms over a run, answers that fit several references."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gapo_megatron.objective.answers import AnswerForms, hashes_of
from gapo_megatron.rewards import exact, math
from gapo_megatron.rollouts import ROW
from gapo_megatron.types import Outcome

REFERENCES = dict(enumerate(["42", "x^2+1", "7", "y=2x"]))


def _table(*rows: tuple[int, str, int]) -> np.ndarray:
    """Rows of (problem, answer, outcome)."""
    table = np.zeros(len(rows), dtype=ROW)
    for row, (problem, answer, outcome) in zip(table, rows, strict=True):
        row["problem"], row["outcome"] = problem, outcome
        row["answer"], row["answer_form"] = hashes_of(answer)
    return table


def test_a_form_is_new_in_the_first_step_that_has_it():
    forms = AnswerForms()
    first = forms.add(_table((0, "42", 1), (2, "7", 1), (1, "x^2+1", 0)), REFERENCES)
    assert first["reward/new_form_share"] == 1.0
    second = forms.add(_table((0, "43", 1), (1, "y^2 + 9", 1), (1, "0=0", 2)), REFERENCES)
    assert second["reward/new_form_share"] == 0.5  # the wrong one of the first step was not correct
    assert forms.add(_table((1, "0=0", 1)), REFERENCES)["reward/new_form_share"] == 1.0
    assert forms.add(_table((1, "1=1", 1)), REFERENCES)["reward/new_form_share"] == 0.0


def test_an_answer_that_is_correct_for_several_references_is_counted():
    found = AnswerForms().add(
        _table((1, "0=0", 1), (3, "0=0", 1), (0, "42", 1), (0, "42", 1)), REFERENCES
    )
    assert found["reward/several_references_share"] == 0.5
    alike = AnswerForms().add(_table((0, "42", 1), (1, "42", 1)), {0: "42", 1: " 42"})
    assert alike["reward/several_references_share"] == 0.0


def test_without_a_correct_answer_that_is_told_there_is_no_share():
    assert AnswerForms().add(_table((0, "42", 0), (0, "", 1), (0, "4", 2)), REFERENCES) == {}


def test_a_restored_monitor_goes_on_as_if_it_had_not_stopped():
    forms, other = AnswerForms(), AnswerForms()
    forms.add(_table((0, "42", 1), (1, "x^2+1", 1)), REFERENCES)
    other.load_state_dict(json.loads(json.dumps(forms.state_dict())))
    table = _table((0, "0=0", 1), (2, "8", 1), (1, "z^9+4", 1))
    assert other.add(table, REFERENCES) == forms.add(table, REFERENCES)
    assert other.state_dict() == forms.state_dict()


@pytest.mark.parametrize(
    ("verdict", "answer"),
    [(math.verify(r"\boxed{41+1}", "42"), "41+1"), (exact.verify("3>4", "4"), "4")],
)
def test_verifiers_tell_the_answer_that_is_correct(verdict, answer):
    assert (verdict.outcome, verdict.answer) == (Outcome.CORRECT, answer)
