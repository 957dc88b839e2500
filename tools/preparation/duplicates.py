"""Find problems that a data set holds more than once, or with contradictory answers."""

from __future__ import annotations

import hashlib

from gapo_megatron.rewards import Pool
from gapo_megatron.rewards.math import accepted_answers
from gapo_megatron.types import Outcome

COMPARE_TIMEOUT_S = 120
"""Far more than two answers need: a comparison must not depend on how busy the machine is."""


class Duplicates:
    """The first problem of every text, and all answers given to that text.

    Texts that differ only in white space are the same. Memory, per text: a digest, an id, an answer
    and the answers that are spelt differently; no texts.
    """

    def __init__(self, kind: str) -> None:
        """Start empty.

        Args:
            kind: verifier, which decides when answers are equal. `math`: if the verifier says so,
                in worker processes; `code`: always, since one set of tests may be part of another;
                otherwise if their text is the same.
        """
        self._kind = kind
        self._first: dict[bytes, tuple[str, str]] = {}
        self._others: dict[bytes, list[str]] = {}
        """Answers spelt differently from the first; after `compare`, those that are not equal."""

    def add(self, id: str, *, text: str, answer: str) -> str | None:
        """Add a problem; returns the id of the first one with this text, None if it is new."""
        key, answer = _key(text), "" if self._kind == "code" else answer
        if key not in self._first:
            self._first[key] = (id, answer)
            return None
        first_id, first = self._first[key]
        if answer != first and answer not in self._others.setdefault(key, []):
            self._others[key].append(answer)
        return first_id

    def compare(self) -> None:
        """Compare the answers of every text with several spellings.

        Raises:
            RewardError: see `Pool.judge`.
        """
        if self._kind == "math":
            self._others = self._different(self._others)

    @property
    def num_contradictory(self) -> int:
        """Number of texts with contradictory answers."""
        return len(self._others)

    def first(self, text: str) -> str:
        """Id of the first problem with this text."""
        return self._first[_key(text)][0]

    def answers(self, text: str) -> list[str]:
        """Contradictory answers to this problem, as in the data set; empty if there are none."""
        key = _key(text)
        others = self._others.get(key)
        return [self._first[key][1], *others] if others else []

    def _different(self, others: dict[bytes, list[str]]) -> dict[bytes, list[str]]:
        """Keep the spellings that are not equal to the text's first answer.

        Either may say more than the other (a unit, a part), so each is the reference once.
        """
        pairs = [(key, self._first[key][1], other) for key in others for other in others[key]]
        items = [
            (f"\\boxed{{{accepted_answers(given)[0]}}}", reference)
            for _, first, other in pairs
            for given, reference in ((first, other), (other, first))
        ]
        if not items:
            return {}
        with Pool("gapo_megatron.rewards.math", num_workers=2, timeout_s=COMPARE_TIMEOUT_S) as pool:
            verdicts = iter(pool.judge(items))
        different: dict[bytes, list[str]] = {}
        for key, _, other in pairs:
            if Outcome.CORRECT not in (next(verdicts).outcome, next(verdicts).outcome):
                different.setdefault(key, []).append(other)
        return different


def _key(text: str) -> bytes:
    plain = " ".join(text.split()).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(plain, digest_size=16).digest()
