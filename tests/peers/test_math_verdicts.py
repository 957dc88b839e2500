"""Verdicts on real problems: reference answers, other verifiers' tests, labelled solutions.

Reads the public problem sets beside the checkout, and is skipped without them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.rewards import Pool
from gapo_megatron.types import Outcome

DATA = Path(__file__).parents[3] / "shared" / "data"
CORRECT, WRONG, UNKNOWN = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="needs the public problem sets beside the checkout"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool("gapo_megatron.rewards.math", num_workers=2, timeout_s=60) as pool:
        yield pool


def _rows(name: str) -> list[dict[str, Any]]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """Of DeepScaleR's 40,308 rows, one each."""
    return [row["answer"] for row in _rows("deepscaler/deepscaler_40k_by_difficulty.jsonl")]


def _box(answer: str) -> str:
    return f"Therefore the answer is $\\boxed{{{answer}}}$."


# A brace of theirs is never closed: they judge nobody.
DAMAGED = {
    "3,-\\frac{3}{2}+\\frac{3i\\sqrt{3}}{2},-\\frac{3}{2}-\\frac{3i\\sqrt{3}}{2",
    "\\frac{2 k n}{n+k-1}-2 \\frac{k!n!}{(k+n-1)!",
}


@pytest.mark.system
def test_every_reference_answer_of_deepscaler_is_equal_to_itself(pool, answers):
    distinct = sorted(set(answers))
    assert len(answers) == 40_308
    verdicts = pool.judge([(_box(answer), answer) for answer in distinct])
    failed = {a: v for a, v in zip(distinct, verdicts, strict=True) if v.outcome is not CORRECT}
    assert failed.keys() == DAMAGED
    assert {verdict.outcome for verdict in failed.values()} == {UNKNOWN}
    assert len(failed) / len(distinct) < 0.005


def _respell(answer: str) -> str:
    """The same answer in other letters, so that reading and comparing it take part."""
    answer = re.sub(r"^(-?\d+)$", r"\1.0", answer)
    answer = re.sub(r"^(-?)\\[dt]?frac\{(\w+)\}\{(\w+)\}$", r"\1\2/\3", answer)
    return answer.replace("\\sqrt{", "\\sqrt[2]{").replace("\\pi", "{\\pi}")


@pytest.mark.system
def test_reference_answers_in_another_spelling_are_equal(pool, answers):
    respelled = sorted({answer for answer in answers if _respell(answer) != answer})
    sample = random.Random(0).sample(respelled, 1500)
    verdicts = pool.judge([(_box(_respell(answer)), answer) for answer in sample])
    failed = [
        (answer, _respell(answer), verdict.reason)
        for answer, verdict in zip(sample, verdicts, strict=True)
        if verdict.outcome is not CORRECT
    ]
    assert len(failed) < 5, failed


SAME_VALUE = {
    ("$-\\frac{144}{1008}$", "$-\\frac{1}{7}$"),
}
"""Answers of the sample that are written differently and are equal: each was looked at."""


@pytest.mark.system
def test_no_answer_of_another_problem_is_accepted_unless_it_is_the_same_value(pool, answers):
    # Half of them drawn from all, most of which are integers; half from those that differ from the
    # reference in its digits alone.
    rng = random.Random(8)
    alike: dict[str, set[str]] = {}
    for answer in answers:
        alike.setdefault(re.sub(r"\d+", "0", answer), set()).add(answer)
    shapes = [sorted(shape) for shape in alike.values() if len(shape) > 1]
    pairs = [tuple(rng.sample(rng.choice(shapes), 2)) for _ in range(500)]
    while len(pairs) < 1000:
        reference, given = rng.sample(answers, 2)
        if reference != given:
            pairs.append((reference, given))
    verdicts = pool.judge([(_box(given), reference) for reference, given in pairs])
    judged = list(zip(pairs, verdicts, strict=True))
    assert {pair for pair, verdict in judged if verdict.outcome is CORRECT} == SAME_VALUE
    unknown = [verdict.reason for _, verdict in judged if verdict.outcome is UNKNOWN]
    assert len(unknown) <= 5, unknown


# Other verifiers' own tests. Ours judges what is boxed, so an answer that stands in a sentence is
# boxed first; where it cannot be told apart from the sentence, the case is about extraction, which
# is not ours to do.

_ENVIRONMENT = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\.|[^$\\])+)\$", re.DOTALL
)
_OPENING = re.compile(r"^(?:The (?:answer|angle|length|ratio|result) is|Answer)[: ]*|[. ]*$")


def _boxed(case: dict[str, Any]) -> str | None:
    """The response, with its answer in a box; None if there is no telling which part that is."""
    prediction = case["pred"]
    if "NativeLetters" in case["params"].get("match_types", []):
        return None  # letters of choices, out of sentences
    if "\\boxed" in prediction:
        return prediction
    found = [next(filter(None, match.groups())) for match in _ENVIRONMENT.finditer(prediction)]
    around = _ENVIRONMENT.sub("", prediction)
    if len(found) == 1 and len(around) < 40:
        return f"\\boxed{{{found[0]}}}"
    answer = _OPENING.sub("", prediction)
    if case["params"].get("reward_fn") == "geometry3k_reward_fn":
        answer = (re.findall(r"\[([^\[\]]+)\]", answer) or [answer])[-1]
    is_sentence = re.search(r"[^\x00-\x7f]|(?<![\\a-zA-Z{])[a-zA-Z]{3,} ", answer) or found
    return None if is_sentence else f"\\boxed{{{answer}}}"


# By suite: cases that can be boxed, and those in which we differ, by line, each with the reason.
SUITES = {
    "lighteval": (
        177,
        {
            219: "9.5/3.14159 is 3.02: the suite takes any number behind \\approx",
            595: "1/3 is not about 1.3, likewise",
            246: "a sentence between dollar signs: unknown",
            265: "1000,99 is two numbers here; a decimal comma is not taken for a point",
            266: "1,22 likewise",
            326: "a line break within dollar signs is nothing special in a box",
            327: "likewise",
            332: "1/2 = 10/9: the suite reads its end, to us what is false is no answer",
            371: "a whole solution as the reference: it cannot be read, so unknown",
            560: "x = 5+5+1 = 7 = 11: the suite reads its end, to us what is false is no answer",
            571: "likewise",
            577: "x = 5+5+1 = 1/3, likewise",
            713: "0.33 is not 1/3: the suite compares two decimals there, we six digits",
            732: "2.6667 is not 8/3, likewise",
            865: "the answer stands outside of the dollar signs that were boxed",
            930: "10,200 + $255 = $10,455: dollars were taken for mathematics",
            987: "a tuple is given twice: to the suite they are sets, we count",
            1074: "likewise",
            1099: "the reference opens a box that it never closes: unknown",
        },
    ),
    "skythought": (
        23,
        {
            21: "3.14159 is not 3.1416: the suite allows a relative error of 1e-4, we 1e-6",
            25: "2 is not 2.0001, likewise",
            28: "75 is not 0.75 unless one of them says percent",
            53: "an empty reference judges nobody: unknown",
        },
    ),
    "hendrycks_is_equiv": (
        16,
        {
            12: "several answers count in any order, the suite compares text",
            47: "likewise",
        },
    ),
    "areal": (44, {}),
}


@pytest.mark.parametrize("suite", SUITES)
def test_other_verifiers_agree_but_for_what_is_explained(pool, suite):
    num_cases, explained = SUITES[suite]
    cases = [(case, _boxed(case)) for case in _rows(f"verifier_pairs/{suite}.jsonl")]
    items = [(text, case["gold"] or "", case) for case, text in cases if text is not None]
    assert len(items) == num_cases
    verdicts = pool.judge([(text, gold) for text, gold, _ in items])
    differ = {
        case["line"]: verdict
        for (_, _, case), verdict in zip(items, verdicts, strict=True)
        if (verdict.outcome is CORRECT) != bool(case["expected"])
    }
    assert differ.keys() == explained.keys(), differ


def test_every_label_of_gsm8k_solutions_is_met(pool):
    items, judged = [], []
    for row in _rows("verifier_completions/gsm8k_model_solutions.jsonl"):
        reference = row["ground_truth"].rpartition("A:")[2].strip()
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            solution = row[model]["solution"]
            given = solution.rpartition("A:")[2].strip() if "A:" in solution else ""
            items.append((f"{solution}\n{_box(given)}", reference))
            judged.append(CORRECT if row[model]["is_correct"] else WRONG)
    verdicts = pool.judge(items)
    assert len(judged) == 5276
    assert [verdict.outcome for verdict in verdicts] == judged
