"""Compares a program's outputs with the expected ones, by the rules of the benchmarks."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

TOLERANCE = 1e-6
"""Absolute or relative tolerance where the expected number is not whole. Problems print or ask for
six to nine digits."""

_WHOLE = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?")
"""The usual spellings of numbers. Other tokens are compared as text: `007`, `+5`, `1_000`, `0x1f`,
`inf`, `nan`, digits of other scripts."""


def same_text(given: str, expected: str) -> bool:
    """Compare standard outputs token by token, ignoring the amount of whitespace.

    Tokens are equal as text or as numbers. Whole numbers must be exact, but "3.0" and "3e0" equal
    3. Other numbers are equal within `TOLERANCE`.
    """
    given_tokens, expected_tokens = given.split(), expected.split()
    if len(given_tokens) != len(expected_tokens):
        return False
    return all(map(_same_token, given_tokens, expected_tokens))


def _same_token(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected)):
        return False
    if _WHOLE.fullmatch(expected):
        # Exact: "3.0" is 3, but 2**53 + 1 is not 2**53.
        return not _WHOLE.fullmatch(given) and Decimal(given) == Decimal(expected)
    numbers = float(given), float(expected)
    if any(map(math.isinf, numbers)):  # larger than any float
        return Decimal(given) == Decimal(expected)
    return _close(*numbers)


def same_value(given: Any, expected: Any, *, tolerance: float = TOLERANCE) -> bool:
    """Compare values encoded by `sandbox.inside.values.encode`; `given` may be hostile.

    Values are not decoded: a set or dict with colliding hashes would take hours to build. A tuple
    equals a list, and a numeric key equals its text, because JSON has neither.
    """
    if isinstance(expected, float) and isinstance(given, float | int):
        return _close(given, expected, tolerance)
    ours, theirs = _items(given), _items(expected)
    if ours is not None and theirs is not None:
        return len(ours) == len(theirs) and all(
            same_value(one, other, tolerance=tolerance)
            for one, other in zip(ours, theirs, strict=True)
        )
    return bool(given == expected)


def _items(value: Any) -> list[Any] | None:
    """Kind of the collection and its items in canonical order; None if it is no collection."""
    if isinstance(value, list):
        return ["list", *value]
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, content),) = value.items()
    if not isinstance(content, list):
        return None
    if kind == "tuple":
        return ["list", *content]
    if kind == "set":
        return ["set", *sorted(content, key=json.dumps)]
    if kind == "dict" and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        pairs = [[str(key) if isinstance(key, int | float) else key, it] for key, it in content]
        return ["dict", *sorted(pairs, key=lambda pair: json.dumps(pair[0]))]
    return [kind, *content]


def _close(given: float, expected: float, tolerance: float = TOLERANCE) -> bool:
    if math.isnan(expected):
        return math.isnan(given)
    try:
        return math.isclose(given, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an int beyond any float
        return False
