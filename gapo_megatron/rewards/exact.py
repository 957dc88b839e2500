"""Verifier of the demo's task: the last field of the response is the answer, to the letter."""

from __future__ import annotations

from gapo_megatron.types import Outcome, Verdict

FIELD_SEPARATOR = ">"
"""Stands between the steps of a response: "11>16>25" answers 25."""


def verify(response: str, answer: str) -> Verdict:
    """Compare the text after the last separator with `answer`. Pure; never raises."""
    given = response.rsplit(FIELD_SEPARATOR, 1)[-1]
    if given == answer:
        return Verdict(Outcome.CORRECT)
    return Verdict(Outcome.WRONG, f"answered {given!r}, expected {answer!r}")


def check_answer(answer: str) -> None:
    """Refuse an answer that no response can give.

    Raises:
        ValueError: it has the separator in it, behind which a response is read.
    """
    if FIELD_SEPARATOR in answer:
        raise ValueError(f"no response can give it: {FIELD_SEPARATOR!r} ends a field")
