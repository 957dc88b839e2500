"""Verifier of mathematical answers: math-verify reads LaTeX and plain text, sympy compares."""

from __future__ import annotations

import threading

import math_verify
from math_verify.errors import TimeoutException

from gapo_megatron.types import Outcome, Verdict

TIMEOUT_S = 5
"""For each of parsing the answer, parsing the response, and comparing the two."""


def verify(response: str, answer: str) -> Verdict:
    """Say whether `response` ends in a value equal to `answer`.

    The reference is read as LaTeX whether or not it stands in a box or between dollar signs. A
    response without any expression is wrong; a reference that cannot be read, or a comparison that
    fails or outlasts `TIMEOUT_S`, is unknown. Never raises. The time limit is a signal alarm, which
    works in the main thread alone; elsewhere the verdict is unknown.
    """
    if threading.current_thread() is not threading.main_thread():
        return Verdict(Outcome.UNKNOWN, "math answers can only be verified in the main thread")
    try:
        gold = _parse(f"\\boxed{{{answer}}}") or _parse(answer)
        if not gold:
            return Verdict(Outcome.UNKNOWN, f"the reference answer {answer!r} cannot be read")
        given = _parse(response)
        if not given:
            return Verdict(Outcome.WRONG, "the response holds no mathematical answer")
        equal = math_verify.verify(gold, given, timeout_seconds=TIMEOUT_S, raise_on_error=True)
    except TimeoutException:  # a BaseException, so that sympy's own handlers do not swallow it
        return Verdict(Outcome.UNKNOWN, f"took longer than {TIMEOUT_S} s")
    except Exception as error:  # on hostile input sympy raises anything at all
        return Verdict(Outcome.UNKNOWN, f"{type(error).__name__} while comparing")
    if equal:
        return Verdict(Outcome.CORRECT)
    return Verdict(Outcome.WRONG, f"expected {answer!r}")


def _parse(text: str) -> list[object]:
    return math_verify.parse(text, parsing_timeout=TIMEOUT_S, raise_on_error=True)
