"""Verifier of mathematical answers: our policy around math-verify (docs/rewards.md).

What is boxed last is the answer. `spelling` gives it one spelling, `plain` and `units` decide what
needs no algebra, `comparison` lists and phrases, and `expressions` asks math-verify for the rest.
"""

from __future__ import annotations

import functools

from gapo_megatron.rewards.math import expressions
from gapo_megatron.rewards.math.boxes import boxes, closing_bracket, without_boxes
from gapo_megatron.rewards.math.comparison import compare, equal_lists, forget, is_read, split
from gapo_megatron.rewards.math.effort import TooMuchWorkError, limited
from gapo_megatron.rewards.math.spelling import clean, in_radians
from gapo_megatron.rewards.response import final_part
from gapo_megatron.types import Outcome, Verdict

MOST_CHARACTERS = 2_000
"""Characters read of a box, beside ten times the reference's; a longer one is no answer."""

MOST_CPU_S = 2.0
"""Processor time of a verdict; the slowest respelled DeepScaleR reference takes about 1 s."""

_SOLUTION = "####"
"""What GSM8K writes between a worked solution and its final answer."""

_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TooMuchWorkError,
    TypeError,
    ValueError,
)
"""What sympy and math-verify raise of what they cannot compute."""


def verify(response: str, answer: str) -> Verdict:
    r"""Say whether the last `\boxed` of the final part of `response` equals `answer`.

    Unknown if the reference cannot be read: it could judge nobody. An answer that cannot be read,
    is far larger than the reference, or cannot be compared within `MOST_CPU_S` where an ordinary
    expression can, is wrong. May raise or hang where one instruction does: `Pool` makes that
    unknown too.

    Args:
        response: what the model wrote; thoughts, ended by `</think>`, are no part of the answer.
        answer: the reference, bare or between dollar signs or in a box.
    """
    try:
        reference = _read_reference(answer)
    except ValueError as error:
        return Verdict(Outcome.UNKNOWN, str(error))
    found = boxes(final_part(response))
    if not found:
        return Verdict(Outcome.WRONG, "no boxed answer in the final part")
    last = found[-1]
    if last is None:
        return Verdict(Outcome.WRONG, "the last box is never closed")
    if len(last) > MOST_CHARACTERS + 10 * len(answer):
        return Verdict(Outcome.WRONG, f"the last box has {len(last)} characters")
    try:
        with limited(MOST_CPU_S):
            verdict = _judge(found, reference)
        is_silent = verdict.outcome is Outcome.UNKNOWN and not verdict.reason
        return _unreadable(answer) if is_silent else verdict
    except _FAILURES as error:
        forget()
        reason = f"{type(error).__name__} {error}".strip()
    if _is_workable(reference):
        return Verdict(Outcome.WRONG, f"no comparing {last[:100]!r} with {answer!r}: {reason}")
    return Verdict(Outcome.UNKNOWN, f"no comparing with the reference answer {answer!r}: {reason}")


def _judge(found: list[str | None], reference: str) -> Verdict:
    last = without_boxes(found[-1] or "")
    verdict = compare(clean(last), reference)
    # An answer of several parts may have been given in as many boxes.
    num_parts = len(split(reference))
    if verdict.outcome is not Outcome.CORRECT and 1 < num_parts <= len(found):
        parts = [clean(box or "") for box in found[-num_parts:]]
        if equal_lists(", ".join(parts), reference):
            return Verdict(Outcome.CORRECT)
    if verdict.outcome is not Outcome.CORRECT and "\\pi" in reference:
        angle = in_radians(last)
        if angle and compare(angle, reference).outcome is Outcome.CORRECT:
            return Verdict(Outcome.CORRECT)
    return verdict


@functools.lru_cache(maxsize=1024)
def _is_workable(reference: str) -> bool:
    """Whether an ordinary expression can be compared with it: else it is to blame, not another."""
    try:
        with limited(MOST_CPU_S):
            return compare("x+\\sqrt{2}", reference).outcome is not Outcome.UNKNOWN
    except _FAILURES:
        forget()
        return False


def check_answer(answer: str) -> None:
    """Refuse a reference that no response could be compared with; nothing is parsed.

    Raises:
        ValueError: shows it.
    """
    _read_reference(answer)


def check_reference(answer: str) -> None:
    """Refuse a reference that is read by its letters alone, or in two ways: no data to train on.

    Takes some milliseconds; may raise as `verify` does.

    Raises:
        ValueError: shows it, and the two readings.
    """
    reference = _read_reference(answer)
    if not is_read(reference):
        raise ValueError(_unreadable(answer).reason)
    if (both := expressions.readings(reference)) and (
        compare(*both).outcome is not Outcome.CORRECT
    ):
        raise ValueError(
            f"the reference answer {answer!r} is read in two ways: {both[0]!r} or {both[1]!r}"
        )


def _read_reference(answer: str) -> str:
    """The reference, cleaned; ValueError if there is none, or no response could give it."""
    if final_part(answer) != answer:
        raise ValueError(f"the reference answer {answer!r} has the marks of thoughts in it")
    if _SOLUTION in answer:
        raise ValueError(
            f"it is a worked solution, with {answer[answer.rindex(_SOLUTION) :][:40]!r} at its "
            "end: put only the final answer there"
        )
    is_closed = closing_bracket(f"{{{answer}}}", 0) == len(answer) + 2
    found = boxes(answer) if is_closed else []
    reference = clean(", ".join(map(str, found)) if len(found) > 1 else answer) if is_closed else ""
    if not reference:
        raise ValueError(_unreadable(answer).reason)
    return reference


def _unreadable(answer: str) -> Verdict:
    return Verdict(Outcome.UNKNOWN, f"the reference answer {answer!r} cannot be read")


__all__ = ["check_answer", "check_reference", "verify"]
