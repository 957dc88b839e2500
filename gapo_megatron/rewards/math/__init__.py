"""Verifier of mathematical answers, on top of math-verify (docs/rewards.md).

The last box is the answer. `spelling` normalises it; `plain` and `units` compare what needs no
algebra, `comparison` lists and phrases, and `expressions` uses math-verify for the rest.
"""

from __future__ import annotations

import functools
import json

from gapo_megatron.rewards.final_answer import final_answer
from gapo_megatron.rewards.math import expressions
from gapo_megatron.rewards.math.boxes import boxes, closing_bracket, last_boxes, without_boxes
from gapo_megatron.rewards.math.comparison import compare, equal_lists, forget, is_read, split
from gapo_megatron.rewards.math.limits import TooMuchWorkError, limited
from gapo_megatron.rewards.math.spelling import clean, in_radians
from gapo_megatron.types import Outcome, Verdict

MOST_CHARACTERS = 2_000
"""Longest box that is read, beyond ten times the length of the reference."""

MOST_CPU_S = 2.0
"""CPU seconds per verdict; the slowest respelled DeepScaleR reference takes about 1 s."""

_SOLUTION = "####"
"""Mark between a worked solution of GSM8K and its final answer."""

_MISSING = frozenset(["nan", "NaN", "None", "null", "NULL", "N/A", "<NA>"])
"""Texts of a missing value, as tables write them."""

_FAILURES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, NotImplementedError, RecursionError,
    TooMuchWorkError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions of sympy and math-verify for what they cannot compute."""


def verify(response: str, answer: str) -> Verdict:
    r"""Say whether the last `\boxed` of the final answer in `response` equals `answer`.

    Of several accepted answers (`accepted_answers`) it must equal any. Unknown if the reference
    cannot be read. Wrong if the answer cannot be read, is far larger than the reference, or cannot
    be compared within `MOST_CPU_S` while an ordinary expression can. May raise or hang in a single
    instruction: `Pool` makes that unknown, too.

    Args:
        response: text of the model; its thoughts, up to `</think>`, are ignored.
        answer: the reference: bare, between dollar signs, or boxed; or several as a JSON list.
    """
    verdicts = []
    for one in accepted_answers(answer):
        verdicts.append(_verify(response, one))
        if verdicts[-1].outcome is Outcome.CORRECT:
            return verdicts[-1]
    # It may equal the answer that it could not be compared with.
    return next((one for one in verdicts if one.outcome is Outcome.UNKNOWN), verdicts[0])


def accepted_answers(answer: str) -> tuple[str, ...]:
    """The reference answers, any of which is right: those of a JSON list of texts, or the answer.

    A list of anything else is an answer itself: `[1, 2]` is an interval.
    """
    if answer.lstrip().startswith("["):
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            return (answer,)
        if found and all(isinstance(one, str) for one in found):
            return tuple(found)
    return (answer,)


def _verify(response: str, answer: str) -> Verdict:
    """The verdict on a response by one reference answer."""
    try:
        reference = _read_reference(answer)
    except ValueError as error:
        return Verdict(Outcome.UNKNOWN, str(error))
    found = boxes(final_answer(response) or "")
    if not found:
        return Verdict(Outcome.WRONG, "no box in the final answer")
    last = found[-1]
    if last is None:
        return Verdict(Outcome.WRONG, "the last box is never closed")
    if len(last) > MOST_CHARACTERS + 10 * len(answer):
        return Verdict(Outcome.WRONG, f"the last box has {len(last)} characters")
    try:
        with limited(MOST_CPU_S):
            verdict = _judge(found, reference)
        if verdict.outcome is Outcome.CORRECT:
            return Verdict(Outcome.CORRECT, answer=last)
        is_silent = verdict.outcome is Outcome.UNKNOWN and not verdict.reason
        return _unreadable(answer) if is_silent else verdict
    except _FAILURES as error:
        forget()
        reason = f"{type(error).__name__} {error}".strip()
    if _is_workable(reference):
        reason = f"{last[:100]!r} cannot be compared with {answer!r}: {reason}"
        return Verdict(Outcome.WRONG, reason)
    reason = f"nothing can be compared with the reference answer {answer!r}: {reason}"
    return Verdict(Outcome.UNKNOWN, reason)


def _judge(found: list[str | None], reference: str) -> Verdict:
    last = without_boxes(found[-1] or "")
    verdict = compare(clean(last), reference)
    # An answer of several parts may be in as many boxes.
    num_parts = len(split(reference))
    if verdict.outcome is not Outcome.CORRECT and 1 < num_parts <= len(found):
        parts = [clean(without_boxes(box or "")) for box in found[-num_parts:]]
        if equal_lists(", ".join(parts), reference):
            return Verdict(Outcome.CORRECT)
    if verdict.outcome is not Outcome.CORRECT and "\\pi" in reference:
        angle = in_radians(last)
        if angle and compare(angle, reference).outcome is Outcome.CORRECT:
            return Verdict(Outcome.CORRECT)
    return verdict


@functools.lru_cache(maxsize=1024)
def _is_workable(reference: str) -> bool:
    """Whether an ordinary expression can be compared with it; if not, the reference is to blame."""
    try:
        with limited(MOST_CPU_S):
            return compare("x+\\sqrt{2}", reference).outcome is not Outcome.UNKNOWN
    except _FAILURES:
        forget()
        return False


def check_answer(answer: str) -> None:
    """Refuse a reference that no response can equal; fast, without parsing.

    Raises:
        ValueError: shows the reference.
    """
    for one in accepted_answers(answer):
        _read_reference(one)


def check_reference(answer: str) -> None:
    """Refuse a reference that can be compared only as text, or has two readings.

    Takes some milliseconds; may raise as `verify` does.

    Raises:
        ValueError: shows the reference and its readings.
    """
    for one in accepted_answers(answer):
        _check_reference(one)


def _check_reference(answer: str) -> None:
    reference = _read_reference(answer)
    if not is_read(reference):
        raise ValueError(_unreadable(answer).reason)
    if (both := expressions.readings(reference)) and (
        compare(*both).outcome is not Outcome.CORRECT
    ):
        raise ValueError(
            f"the reference answer {answer!r} can be read in two ways: {both[0]!r} or {both[1]!r}"
        )


def _read_reference(answer: str) -> str:
    """Clean the reference; ValueError if it is missing or no response can equal it."""
    if final_answer(answer) != answer:
        raise ValueError(f"the reference answer {answer!r} contains <think> or </think>")
    if _SOLUTION in answer:
        raise ValueError(
            f"the answer is a worked solution ending in "
            f"{answer[answer.rindex(_SOLUTION) :][:40]!r}; put only the final answer "
            f"there (tools/prepare_data.py own --answer-after '{_SOLUTION}' does)"
        )
    if answer.strip() in _MISSING:
        raise ValueError(f"the reference answer {answer!r} stands for a missing value")
    is_closed = closing_bracket(f"{{{answer}}}", 0) == len(answer) + 2
    found = ", ".join(map(str, last_boxes(answer))) if is_closed else ""
    reference = clean(without_boxes(found or answer)) if is_closed else ""
    if not reference:
        raise ValueError(_unreadable(answer).reason)
    return reference


def _unreadable(answer: str) -> Verdict:
    return Verdict(Outcome.UNKNOWN, f"the reference answer {answer!r} cannot be read")


__all__ = ["accepted_answers", "check_answer", "check_reference", "verify"]
