"""Mathematical answers: which part of a response is the answer, and what equals what."""

from __future__ import annotations

import contextlib
import re
import signal
import threading

import pytest

from gapo_megatron.config import RewardConfig
from gapo_megatron.rewards import math, start_pool
from gapo_megatron.rewards.math import expressions
from gapo_megatron.rewards.math.limits import TooMuchWorkError, limited
from gapo_megatron.types import Outcome
from tests.messages import mentions

CORRECT, WRONG, UNKNOWN = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("So it is $\\boxed{42}$.", CORRECT),
        ("\\boxed{41}, no: \\boxed{42}", CORRECT),
        ("\\boxed{42}, no: \\boxed{41}", WRONG),
        ("\\boxed 42", CORRECT),
        ("\\boxed{42}. I used \\boxed to mark it.", CORRECT),
        ("\\boxed{42}, in `\\boxed`.", CORRECT),
        ("\\boxed{42}, no: \\boxed -42", WRONG),
        ("\\fbox{42}", CORRECT),
        ("\\boxed{\\boxed{42}}", CORRECT),
        ("\\[\\boxed{ \n 42 \n }\\]", CORRECT),
        ("\\boxed{\\text{So } \\{43\\}}", WRONG),
        # No box, no answer, whatever else is said.
        ("The answer is 42.", WRONG),
        ("$42$", WRONG),
        ("", WRONG),
        ("\\boxed{}", WRONG),
        ("\\boxed", WRONG),
        # A box cut off at the token limit, or never closed, is not one.
        ("\\boxed{42", WRONG),
        ("\\boxed{42} or rather \\boxed{43", WRONG),
        # What is boxed in the thoughts alone is no answer.
        ("<think>\\boxed{42}</think>It is \\boxed{42}", CORRECT),
        ("<think>\\boxed{41}</think>It is \\boxed{42}", CORRECT),
        ("<think>\\boxed{42}</think>It is \\boxed{41}", WRONG),
        ("<think>\\boxed{42}</think>It is 42.", WRONG),
        ("<think>\\boxed{42}", WRONG),
        ("<think>a</think>\\boxed{42} <think>or \\boxed{41}", CORRECT),
        ("\\boxed{42}</think>", WRONG),  # a chat template may have opened the thoughts
        ("a </think> b </think> \\boxed{42}", CORRECT),
    ],
)
def test_the_last_box_of_the_final_part_is_the_answer(response, outcome):
    assert math.verify(response, "42").outcome is outcome


def test_several_answers_may_stand_in_one_box_or_in_several():
    for response, outcome in {
        "\\boxed{1, 2}": CORRECT,
        "\\boxed{2} and \\boxed{1}": CORRECT,
        "first \\boxed{7}, then $\\boxed{1}$ and $\\boxed{2}$": CORRECT,
        "\\boxed{2}": WRONG,
        "\\boxed{1} and \\boxed{3}": WRONG,
        "\\boxed{1}, \\boxed{2} and \\boxed{3}": WRONG,
        "\\boxed{1, 2, 3}": WRONG,
    }.items():
        assert math.verify(response, "1,2").outcome is outcome, response
    # One answer expected: the last box alone, as ever.
    assert math.verify("\\boxed{1} \\boxed{2}", "1").outcome is WRONG


@pytest.mark.parametrize(
    ("reference", "right"),
    [
        ("So $x=\\boxed{5}$. The final answer is $\\boxed{5}$.", "5"),
        ("First \\boxed{x=2}, then the answer \\boxed{5}", "5"),
        ("\\boxed{\\boxed{5}}", "5"),
        # Parts of one answer.
        ("So \\boxed{7}. Hence $\\boxed{1}$, $\\boxed{2}$ and $\\boxed{3}$.", "1, 2, 3"),
        ("$x=\\boxed{1},\\quad y=\\boxed{2}$", "1, 2"),
        ("\\(\\boxed{1}\\) or \\(x_2 = \\boxed{2}\\)", "1, 2"),
        ("\\boxed{1}\\text{ and }\\boxed 2", "1, 2"),
        ("\\boxed{3},\\boxed{3}", "3, 3"),
    ],
)
def test_a_reference_with_several_boxes_is_its_last_ones(reference, right):
    assert math.verify(f"\\boxed{{{right}}}", reference).outcome is CORRECT
    last = right.rpartition(", ")[2]
    for wrong in (f"7, {right}", *[last][: "," in right]):
        assert math.verify(f"\\boxed{{{wrong}}}", reference).outcome is WRONG, wrong


@pytest.mark.parametrize("between", [" cm, ", " \\cup ", " (double) and ", "x+", "&&=" * 40 + "!?"])
def test_boxes_that_may_be_parts_of_one_answer_judge_nobody(between):
    reference = f"\\boxed{{3}}{between}\\boxed{{4}}"
    for given in ("4", "3, 4"):
        verdict = math.verify(f"\\boxed{{{given}}}", reference)
        assert verdict.outcome is UNKNOWN and repr(between) in verdict.reason


@pytest.mark.parametrize(
    "reference",
    ["}", "", "$$", "\\frac{1}{", "3 \\not\\mid \\mid", "nan", "None", "null", "N/A", "<NA> "],
)
def test_a_reference_that_cannot_be_read_judges_nobody(reference):
    verdict = math.verify("\\boxed{1}", reference)
    assert verdict.outcome is UNKNOWN
    assert re.search(mentions("reference", repr(reference)), verdict.reason)


def test_a_reference_with_an_open_brace_judges_nobody_who_repeats_it():
    assert math.verify("\\boxed{\\frac{1}{2}", "\\frac{1}{2").outcome is UNKNOWN
    assert math.verify("\\boxed{\\frac{1}{2}", "\\frac{1}{2}").outcome is WRONG


@pytest.mark.parametrize("answer", ["</think>", "</think> 3", "<think> 3 </think> 3", "<think> 3"])
def test_a_reference_with_the_marks_of_thoughts_is_refused(answer):
    for refuse in (math.check_answer, math.check_reference):
        with pytest.raises(ValueError, match=re.escape(repr(answer))):
            refuse(answer)
    assert math.verify(f"\\boxed{{{answer}}}", answer).outcome is UNKNOWN


def test_an_answer_that_cannot_be_read_is_wrong_where_the_reference_can():
    verdict = math.verify("\\boxed{\\frac{1}{}}", "3")
    assert verdict.outcome is WRONG
    assert repr("\\frac{1}{}") in verdict.reason
    assert "reference" not in verdict.reason
    assert math.verify("\\boxed{\\frac{1}{}}", "3 \\not\\mid n").outcome is UNKNOWN


def test_work_without_end_is_wrong_if_the_reference_is_not_to_blame(monkeypatch):
    math.verify("\\boxed{x+\\sqrt{2}}", "31")  # what the reference takes is known
    math._is_workable.cache_clear()
    monkeypatch.setattr(math, "MOST_CPU_S", 0.5)
    monkeypatch.setattr(math, "_judge", lambda *_: _spin())
    verdict = math.verify("\\boxed{1+1}", "31")
    assert verdict.outcome is WRONG
    assert re.search(mentions("1+1", "'31'"), verdict.reason)
    monkeypatch.setattr(math, "compare", lambda *_: _spin())
    math._is_workable.cache_clear()
    assert math.verify("\\boxed{1+1}", "31").outcome is UNKNOWN
    monkeypatch.undo()
    math._is_workable.cache_clear()
    assert math.verify("\\boxed{31}", "31").outcome is CORRECT


@pytest.mark.parametrize("error", [MemoryError, RecursionError, OverflowError, KeyError])
def test_an_answer_that_breaks_the_comparison_is_wrong(monkeypatch, error):
    def judge(*_):
        raise error("of it")

    monkeypatch.setattr(math, "_judge", judge)
    verdict = math.verify("\\boxed{1+1}", "31")
    assert verdict.outcome is WRONG
    assert re.search(mentions(error.__name__), verdict.reason)


def test_what_is_no_error_of_the_comparison_is_raised(monkeypatch):
    monkeypatch.setattr(math, "_judge", lambda *_: pytest.fail("broken"))
    with pytest.raises(pytest.fail.Exception):
        math.verify("\\boxed{1+1}", "31")


EXPANDS = [
    ("(x^2+y^2-1)^{400}=0", "x^2+y^2=1"), ("(x+y+z)^{60}=1", "x+y+z=1"),
    ("(x+1)^{500}=0", "x=-1"), ("(a+b+c+d)^{300}=0", "a+b+c+d=0"),
    (r"\sin((x+1)^{10000})=0", "x=0"), ("(x+1)^{15}(y+1)^{15}=0", "x=y"),
    (r"\frac{1}{(x+y+1)^{30}}=1", "x+y=0"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "reference"), EXPANDS)
def test_what_expands_too_far_is_wrong_before_it_is_multiplied_out(monkeypatch, given, reference):
    untouched = expressions.math_verify.verify
    monkeypatch.setattr(expressions.math_verify, "verify", lambda *_, **__: pytest.fail("begun"))
    assert math.verify(f"\\boxed{{{given}}}", reference).outcome is WRONG
    monkeypatch.setattr(expressions.math_verify, "verify", untouched)
    # Where the reference expands as far it is compared, and found equal as ever.
    swapped = given.replace("x+1", "1+x").replace("x^2+y^2-1", "y^2+x^2-1")
    assert math.verify(f"\\boxed{{{swapped}}}", given).outcome is CORRECT


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("(x^2+y^2-1)^{40}=0", "x^2+y^2=1"),
        ("(a+b+c+d)^{30}=0", "a+b+c+d=0"),
        ("(x-2)^2(x-3)=0", "x^2-5x+6=0"),
        ("x(y-1)^2=0", "x^2(y-1)=0"),
        ("(x-1)(x^2+1)(y-1)=0", "(x-1)(y-1)=0"),
        ("0.5x^2+0.5y^2=0.5", "x^2+y^2=1"),
        ("(x+1)^{300}", "(1+x)^{300}"),
        (r"(1+\sqrt2)^{300}", r"(\sqrt2+1)^{300}"),
        ("2^{400}x", "4^{200}x"),
    ],
)
def test_what_does_not_expand_far_or_is_decided_without_is_compared(given, reference):
    assert math.verify(f"\\boxed{{{given}}}", reference).outcome is CORRECT


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("(x-2)(y-1)=0", "x(y-1)=0"),
        ("x^2+y^2=2", "x^2+y^2=1"),
        ("x(x^2+y^2-1)=0", "x^2+y^2=1"),
        ("x<3", "3<x"),
        (r"1<x\le3", "1<x<3"),
        ("1<y<3", "1<x<3"),
    ],
)
def test_polynomials_with_other_zeros_and_other_half_lines_are_not_equal(given, reference):
    assert math.verify(f"\\boxed{{{given}}}", reference).outcome is WRONG


def _spin():
    while True:
        with contextlib.suppress(Exception):  # as parsers do
            sum(range(1000))


def test_the_limit_leaves_signals_as_they_were():
    before = signal.getsignal(signal.SIGPROF)
    with contextlib.suppress(TooMuchWorkError), limited(0.01):
        _spin()
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
    outcomes = []
    other = threading.Thread(
        target=lambda: outcomes.append(math.verify("\\boxed{1+1}", "2").outcome)
    )
    other.start()
    other.join()
    assert outcomes == [CORRECT]


def test_a_wrong_answer_is_named():
    assert re.search("'2'.*'3'", math.verify("\\boxed{2}", "3").reason)


# Towers of powers, deep and long nonsense, functions that sympy takes for ever on, code.
HOSTILE = [
    "\\boxed{9^{9^{9^{9}}}}", "\\boxed{9**9**9**9}", "\\boxed{(10^{10})!!!}",
    "\\boxed{1e999999999}", 
    "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}", "\\boxed{" * 50_000, "\\boxed{1}" * 20_000,
    "\\boxed{" + "(" * 2_000 + "}", "\\boxed{" + "\\frac{1}{" * 300 + "x" + "}" * 301,
    "\\boxed{" + "1+" * 5_000 + "1}", "\\boxed{" + "1," * 20_000 + "1}",
    "\\boxed{\\int_0^1 x^{x^x} dx}", "\\boxed{\\frac{1}{0}}",
    "\\boxed{\\lim_{x \\to 0} \\frac{\\sin x}{x^{99}}}",
    "\\boxed{" + "(" * 50 + "1" + ")" * 50 + "}", "\\boxed{" + "x^{" * 50 + "2" + "}" * 51,
    "\\boxed{" + "\\cup".join(f"({n},{n + 1})" for n in range(0, 200, 2)) + "}",
    "\\boxed{" + " or ".join(f"x^3-{n}x>1" for n in range(40)) + "}",
    "\\boxed{" + "|x|" * 20 + "}",
    "\\boxed{\x00}", "\\boxed{\\left(}", "\\boxed{0." + "3" * 10**5 + "}", "}{" * 500,
    "\\boxed{\\text{" + "a " * 20_000 + "}}", "\\boxed{" + " " * 10**5 + "1x}",
    "<think>" * 10**5, "\\boxed{__import__('os')._exit(0)}", "\\boxed{" + "\\pm" * 200 + "1}",
]  # fmt: skip


def test_hostile_answers_neither_hang_nor_score_nor_leave_the_group():
    with start_pool(RewardConfig(kind="math", timeout_s=60), num_workers=1) as pool:
        verdicts = pool.judge([(response, "3") for response in HOSTILE])
        judged = {
            r[:60]: v.reason
            for r, v in zip(HOSTILE, verdicts, strict=True)
            if v.outcome is not WRONG
        }
        assert judged == {}
        # And the reference may be hostile too: it judges nobody.
        verdicts = pool.judge([("\\boxed{3}", response) for response in HOSTILE[:3]])
        assert {verdict.outcome for verdict in verdicts} <= {UNKNOWN, WRONG}
        assert not [v.reason for v in verdicts if "60 s" in v.reason]
        assert pool.judge([("\\boxed{3}", "3")])[0].outcome is CORRECT
