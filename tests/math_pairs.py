"""Pairs of a reference and an answer, of the tables of the grader's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.rewards import test_rewards_math_classes, test_rewards_math_closed


class Pair(NamedTuple):
    reference: str
    given: str
    is_equal: bool
    kind: str


def table_pairs() -> Iterator[Pair]:
    classes = test_rewards_math_classes.CLASSES | test_rewards_math_closed.CLASSES
    for kind, both in classes.items():
        for is_equal, pairs in zip((True, False), both, strict=True):
            yield from (Pair(*pair, is_equal, kind) for pair in pairs)
