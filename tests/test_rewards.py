"""Verifiers, and scoring of rollouts."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import sympy

from gapo_megatron import rewards
from gapo_megatron.data import arithmetic, load_tokenizer
from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards import exact, math
from gapo_megatron.types import Outcome, Prompt, Rollout

REAL_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("11>16>25", Outcome.CORRECT),
        ("25", Outcome.CORRECT),
        ("11>16>26", Outcome.WRONG),
        ("25>", Outcome.WRONG),
        ("025", Outcome.WRONG),
        (" 25", Outcome.WRONG),
        ("25>16", Outcome.WRONG),
        ("", Outcome.WRONG),
    ],
)
def test_exact_compares_the_last_field_to_the_letter(response, outcome):
    assert exact.verify(response, "25").outcome is outcome


def test_exact_says_what_it_expected():
    assert exact.verify("1>2", "3").reason == "answered '2', expected '3'"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("So the answer is \\boxed{\\frac{1}{2}}.", "0.5"),
        ("\\boxed{\\frac12}", "\\frac{1}{2}"),
        ("The answer is 1,000.", "1000"),
        ("Therefore $x = 4$", "4"),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}"),
        ("\\boxed{(3, \\frac{\\pi}{2})}", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}"),
        ("\\boxed{42}", "$42$"),
    ],
)
def test_math_accepts_equal_values(response, answer):
    assert math.verify(response, answer).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{0.3}", "\\frac{1}{3}"),
        ("\\boxed{x+1}", "x+2"),
        ("\\boxed{(1, 2)}", "(2, 1)"),
        ("I do not know.", "3"),
        ("", "3"),
    ],
)
def test_math_refuses_other_values(response, answer):
    assert math.verify(response, answer).outcome is Outcome.WRONG


def test_math_cannot_judge_by_an_unreadable_reference():
    verdict = math.verify("\\boxed{1}", "}")
    assert verdict.outcome is Outcome.UNKNOWN
    assert "'}' cannot be read" in verdict.reason


def test_math_never_raises_when_the_comparison_does(monkeypatch):
    def fail(*_, **__):
        raise RecursionError("too deep")

    monkeypatch.setattr(math.math_verify, "verify", fail)
    verdict = math.verify("\\boxed{1}", "1")
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.reason == "RecursionError while comparing"


def test_math_gives_up_on_a_comparison_that_hangs(monkeypatch):
    def hang(*_, **__):
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(math, "TIMEOUT_S", 1)
    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", hang)
    start = time.monotonic()
    verdict = math.verify("\\boxed{1}", "1")
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.reason == "took longer than 1 s"
    # Three alarms of 1 s at the most; the rest is room for a busy machine.
    assert time.monotonic() - start < 10


def test_math_outside_the_main_thread_is_unknown_not_wrong():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(math.verify("\\boxed{1}", "1")))
    thread.start()
    thread.join()
    assert verdicts[0].outcome is Outcome.UNKNOWN


def test_math_leaves_sympy_alone_on_hostile_text():
    for text in ("\\boxed{", "\x00", "}{" * 500, "\\frac{1}{0}", "9**9**9", "\\left("):
        assert math.verify(text, "3").outcome in (Outcome.WRONG, Outcome.UNKNOWN)
    assert sympy.Integer(3) == 3  # still in one piece


@pytest.mark.skipif(
    not REAL_DATA.is_dir(), reason="needs the public problem sets beside the checkout"
)
def test_math_accepts_every_reference_answer_of_math500():
    rows = json.loads((REAL_DATA / "math500" / "deepscaler_test.json").read_text(encoding="utf-8"))
    for row in rows:
        verdict = math.verify(f"The answer is $\\boxed{{{row['answer']}}}$.", row["answer"])
        assert verdict.outcome is Outcome.CORRECT, row["answer"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = arithmetic.write_tokenizer(["0123456789+=>"], folder)
    arithmetic.write_initial_model(tokenizer, folder, seed=0)
    return load_tokenizer(folder)


def _rollout(tokenizer, text: str, *, ends: bool = True) -> Rollout:
    ids = tokenizer.encode(text) + [tokenizer.eos_token_id] * ends
    return Rollout(np.array(ids, np.int32), np.zeros(len(ids), np.float32), truncated=not ends)


def test_score_judges_every_rollout_by_its_text(tokenizer):
    prompts = [Prompt("a", (1,), "12"), Prompt("b", (1,), "3")]
    rollouts = [
        (_rollout(tokenizer, "5>12"), _rollout(tokenizer, "5>13")),
        (_rollout(tokenizer, "3", ends=False), _rollout(tokenizer, "3>", ends=False)),
    ]
    verdicts = rewards.score("exact", prompts, rollouts, tokenizer=tokenizer)
    assert [[verdict.reward for verdict in group] for group in verdicts] == [[1, 0], [1, 0]]
    assert rewards.score("math", prompts, rollouts, tokenizer=tokenizer)[1][0].reward == 1


def test_code_is_refused_with_the_reason(tokenizer):
    with pytest.raises(ConfigError, match=r"reward\.kind \('code'\) needs the sandbox"):
        rewards.check_kind("code")
    with pytest.raises(ConfigError, match="available: exact, math"):
        rewards.score("code", [], [], tokenizer=tokenizer)
