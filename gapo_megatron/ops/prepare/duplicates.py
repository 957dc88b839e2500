"""Problems that a data set holds more than once, and those to which it has several answers."""

from __future__ import annotations

import hashlib

from gapo_megatron.ops.prepare.sources import Kind
from gapo_megatron.rewards import Pool
from gapo_megatron.types import Outcome

COMPARE_TIMEOUT_S = 120
"""Far more than two answers need: a comparison must not depend on how busy the machine is."""


class Duplicates:
    """Every text's first problem, and the answers of all its problems.

    Texts are the same that differ in white space alone. Memory: a digest, an id and an answer for
    each text, and the answers that are written otherwise than the first; no texts.
    """

    def __init__(self, kind: Kind) -> None:
        """Begin with none.

        Args:
            kind: says what equal answers are. `math`: equal to its verifier, which compares them in
                processes of its own; `code`: all, as one set of tests may be a part of another;
                else the same text.
        """
        self._kind = kind
        self._first: dict[bytes, tuple[str, str]] = {}
        self._others: dict[bytes, list[str]] = {}
        """Answers written otherwise than the first; once compared, only those that differ."""

    def add(self, id: str, *, text: str, answer: str) -> str | None:
        """Look at a problem; gives the id of the first with this text, None if it is the first."""
        key, answer = _key(text), "" if self._kind == "code" else answer
        if key not in self._first:
            self._first[key] = (id, answer)
            return None
        first_id, first = self._first[key]
        if answer != first and answer not in self._others.setdefault(key, []):
            self._others[key].append(answer)
        return first_id

    def compare(self) -> None:
        """Compare the answers of every text that has several.

        Raises:
            RewardError: see `Pool.judge`.
        """
        if self._kind == "math":
            self._others = self._different(self._others)

    def first(self, text: str) -> str:
        """Id of the first problem with this text."""
        return self._first[_key(text)][0]

    def answers(self, text: str) -> list[str]:
        """Different answers to this problem, as the data set writes them; empty if it has one."""
        key = _key(text)
        others = self._others.get(key)
        return [self._first[key][1], *others] if others else []

    def _different(self, others: dict[bytes, list[str]]) -> dict[bytes, list[str]]:
        """Those of the spellings that are not equal to the text's first.

        The first may say more than another (a unit, a part) or less, so each is the reference once.
        """
        pairs = [(key, self._first[key][1], other) for key in others for other in others[key]]
        items = [
            (f"\\boxed{{{given}}}", reference)
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
