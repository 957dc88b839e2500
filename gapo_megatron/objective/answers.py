"""Watches for rewards that a policy finds without solving: new forms of correct answers.

A policy that has found a gap of the verifier gives answers of a form that was never correct before,
or one answer that is correct for problems whose references differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from gapo_megatron.types import Outcome

_NUMBER = re.compile(r"\d+")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")


def hashes_of(answer: str) -> tuple[int, int]:
    """Two 64-bit hashes: of an answer, and of its form (every number 0, every single letter x).

    (0, 0) for no answer.
    """
    text = "".join(answer.split())
    form = _LETTER.sub("x", _NUMBER.sub("0", text))
    return (_hash(text), _hash(form)) if text else (0, 0)


def _hash(text: str) -> int:
    """64 bits, the same in every process; never 0."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


class AnswerForms:
    """The forms of all correct answers of a run; checkpoints store their hashes."""

    def __init__(self) -> None:
        """Start without any."""
        self._seen: set[int] = set()

    def add(self, table: np.ndarray, references: Mapping[int, str]) -> dict[str, float]:
        """Add the next step.

        Args:
            table: [B] of `rollouts.ROW`: its batch.
            references: reference answers of the problems in the table, by their number.

        Returns:
            `reward/new_form_share` and `reward/several_references_share`; empty without a correct
            answer that the verifier tells.
        """
        rows = table[(table["outcome"] == Outcome.CORRECT.code) & (table["answer"] != 0)]
        if not len(rows):
            return {}
        forms = rows["answer_form"].tolist()
        num_new = sum(form not in self._seen for form in forms)
        self._seen.update(forms)
        pairs = list(zip(rows["answer"].tolist(), rows["problem"].tolist(), strict=True))
        expected: dict[int, set[str]] = {}
        for answer, problem in pairs:
            expected.setdefault(answer, set()).add("".join(references[problem].split()))
        num_several = sum(len(expected[answer]) > 1 for answer, _ in pairs)
        return {
            "reward/new_form_share": num_new / len(rows),
            "reward/several_references_share": num_several / len(rows),
        }

    def state_dict(self) -> list[int]:
        """The hashes, sorted."""
        return sorted(self._seen)

    def load_state_dict(self, state: Sequence[int]) -> None:
        """Restore `state_dict`."""
        self._seen = set(state)


__all__ = ["AnswerForms", "hashes_of"]
