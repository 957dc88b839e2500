"""Verifier of the demo: the last field of the response must equal the answer."""

from __future__ import annotations

from gapo_megatron.types import Outcome, Verdict

FIELD_SEPARATOR = ">"
"""Separates the steps of a response: "11>16>25" answers 25."""


def verify(response: str, answer: str) -> Verdict:
    """Compare the text after the last separator with `answer`. Pure; never raises."""
    given = response.rsplit(FIELD_SEPARATOR, 1)[-1]
    if given == answer:
        return Verdict(Outcome.CORRECT, answer=given)
    return Verdict(Outcome.WRONG, f"answered {given!r}, expected {answer!r}")


def check_answer(answer: str) -> None:
    """Refuse an answer that no response can give.

    Raises:
        ValueError: the answer contains the separator.
    """
    if FIELD_SEPARATOR in answer:
        raise ValueError(f"no response can give it: it contains the separator {FIELD_SEPARATOR!r}")
