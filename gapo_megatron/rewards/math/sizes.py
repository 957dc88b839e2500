"""What would take too long or too much memory to compute, told before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import sympy

MOST_BITS = 2**20
"""Bits of a value that is computed exactly: 300,000 digits."""

MOST_TERMS = 10_000
"""Terms of a sum or product."""


MOST_EXPANDED = 200
"""Terms of an expression that is multiplied out: simplifying twice as many takes two seconds."""

_LETTER_BITS = math.log2(3)
_FRACTION_BITS = 8  # times as many has a power of the fractions that letters are replaced by


class TooLargeError(Exception):
    """The value is."""


def check_size(value: Any) -> None:
    """Refuse what takes too long or too much memory to compute, before anything is."""
    if isinstance(value, sympy.MatrixBase):
        for entry in value:
            _bits(entry)
    elif isinstance(value, sympy.Basic):
        _bits(value)


def _bits(value: Any) -> float:
    """About how many bits its value has, from above, where letters are numbers up to 3."""
    if value.is_Symbol:
        return _LETTER_BITS
    if isinstance(value, sympy.Rational):
        return math.log2(max(abs(value.p), value.q))
    if isinstance(value, sympy.Float):
        return abs(float(sympy.log(abs(value), 2).evalf(5))) + 53 if value else 1.0
    sizes = [_bits(one) for one in getattr(value, "args", ()) if isinstance(one, sympy.Basic)]
    bits = max(sizes, default=2.0)
    if isinstance(value, sympy.Pow | sympy.exp):
        base, exponent = value.as_base_exp()
        bits = max(1.0, _bits(base)) * _size(exponent, _bits(exponent))
        if base.free_symbols and exponent.is_Integer and bits * _FRACTION_BITS > MOST_BITS:
            raise TooLargeError
    elif isinstance(value, sympy.Mul | sympy.Add):
        bits = sum(sizes) if isinstance(value, sympy.Mul) else bits + math.log2(len(sizes) + 1)
    elif isinstance(value, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.subfactorial):
        bits = _size(value.args[0], sizes[0]) * max(1.0, sizes[0])
    elif isinstance(value, sympy.binomial):
        counts = [_size(one, size) for one, size in zip(value.args, sizes, strict=True)]
        bits = max(counts[1] if value.free_symbols else min(counts), 1.0) * max(sizes)
    elif isinstance(value, sympy.Sum | sympy.Product):
        for _, low, high in value.limits:
            if (high - low).is_infinite or _size(high - low, _bits(high - low)) > MOST_TERMS:
                raise TooLargeError
    if bits > MOST_BITS:
        raise TooLargeError
    return bits


def expands_too_far(value: Any) -> bool:
    """Whether multiplying out would make more than `MOST_EXPANDED` terms of it, or of a part."""
    return _terms(value) > MOST_EXPANDED


def _terms(value: Any) -> int:
    """About how many terms it has once it is multiplied out, or its largest part has; from above.

    At most one more than `MOST_EXPANDED`.
    """
    counts = [_terms(one) for one in getattr(value, "args", ()) if isinstance(one, sympy.Basic)]
    largest = max(counts, default=1)
    if largest > MOST_EXPANDED:
        return largest
    if isinstance(value, sympy.Add):
        largest = sum(counts)
    elif isinstance(value, sympy.Mul):
        largest = math.prod(counts)
    elif isinstance(value, sympy.Pow) and value.exp.is_Integer and value.base.free_symbols:
        power = abs(int(value.exp))
        most = min(power, MOST_EXPANDED)  # with more it is too far in any case
        largest = math.comb(most + counts[0] - 1, most)
    return min(largest, MOST_EXPANDED + 1)


def _size(value: Any, bits: float) -> float:
    """An upper bound of what a number of so many bits counts."""
    if value.is_Rational or value.is_Float:
        return float(min(abs(value), 2**64))
    return float(2.0 ** min(bits, 64))


__all__ = ["MOST_BITS", "MOST_TERMS", "TooLargeError", "check_size", "expands_too_far"]
