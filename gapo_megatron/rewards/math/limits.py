"""Limits of the work for one verdict: CPU time, and sizes that are checked before computing."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import sympy

MOST_BITS = 2**20
"""Most bits of a value that is computed exactly: 300,000 digits."""

MOST_TERMS = 10_000
"""Most terms of a sum or product."""

MOST_EXPANDED = 200
"""Most terms of an expanded expression: simplifying twice as many takes two seconds."""

_LETTER_BITS = math.log2(3)
_FRACTION_BITS = 8  # letters are replaced by fractions, whose powers have 8 times as many bits


class TooMuchWorkError(BaseException):
    """The time is over. Not an Exception: parsers and solvers would catch it and continue."""


@contextlib.contextmanager
def limited(cpu_s: float) -> Iterator[None]:
    """Raise TooMuchWorkError in the body after this much CPU time.

    CPU time, because a busy machine must not change a verdict. Signals reach only the main thread:
    in other threads, and during a single long instruction, there is no limit. `check_size` bounds
    what such instructions compute.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _stop)
    # Repeatedly, in case a callback swallows the first exception.
    signal.setitimer(signal.ITIMER_PROF, cpu_s, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooMuchWorkError


class TooLargeError(Exception):
    """A value is too large to compute."""


def check_size(value: Any) -> float:
    """An upper bound of the bits of a value, computing nothing, with letters for numbers up to 3.

    Raises:
        TooLargeError: it takes too long or too much memory.
    """
    parts = value if isinstance(value, sympy.MatrixBase) else [value]
    return max((_bits(one) for one in parts if isinstance(one, sympy.Basic)), default=0.0)


def _bits(value: Any) -> float:
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
    """Whether expanding it, or a part of it, gives more than `MOST_EXPANDED` terms."""
    return _terms(value) > MOST_EXPANDED


def _terms(value: Any) -> int:
    """An upper bound of the terms of the expanded value or of its largest part.

    At most `MOST_EXPANDED` + 1.
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
        most = min(power, MOST_EXPANDED)  # more is too far in any case
        largest = math.comb(most + counts[0] - 1, most)
    return min(largest, MOST_EXPANDED + 1)


def _size(value: Any, bits: float) -> float:
    """An upper bound of a number with this many bits."""
    if value.is_Rational or value.is_Float:
        return float(min(abs(value), 2**64))
    return float(2.0 ** min(bits, 64))
