"""Verifier of word problems: the last number of the response must equal the answer.

`configs/demo_language.toml` names it as code of its own: `gapo_megatron.rewards.number:verify`.
"""

from __future__ import annotations

import re
from decimal import Decimal

from gapo_megatron.types import Outcome, Verdict

# A minus sign belongs to the number unless it stands behind another one: "9-4" ends with 4.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)


def verify(response: str, answer: str) -> Verdict:
    """Compare the last number of `response` with `answer` by value. Pure; never raises."""
    numbers = _NUMBER.findall(response)
    if not numbers:
        return Verdict(Outcome.WRONG, "the response has no number")
    if _value(numbers[-1]) == _value(answer):
        return Verdict(Outcome.CORRECT)
    return Verdict(Outcome.WRONG, f"the last number is {numbers[-1]}, expected {answer}")


def check_answer(answer: str) -> None:
    """Refuse an answer that is no number.

    Raises:
        ValueError: names the answer.
    """
    if not _NUMBER.fullmatch(answer):
        raise ValueError(f"must be a number, not {answer!r}")


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
