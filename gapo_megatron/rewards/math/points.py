"""Compares expressions, equations and inequalities by their values at random points.

One rule of sampling for all of them:

- Every letter takes both signs in four sizes, within (0, 1), a few units, tens and thousands, each
  as often: `|xy|` and `xy`, `max(x, 9)` and `x`, `|x^2-1|` and `x^2-1` differ only in some of them,
  and 2^x hides what is added to it where x is large. At the first points all letters are of one
  size and positive, because letters mostly share a domain such as 0 < p < 1.
- A point counts only where both sides and all that is in them are real: a root or logarithm of a
  negative number has its value by convention, which decides nothing. An odd root is real. A side
  with i may have complex values, but none that a convention chooses.
- Where the reference has values at too few of these points, as `(-1)^n`, letters are whole numbers.
- At a point two values are equal if their difference is a rounding error, which shrinks as the
  precision grows. So a difference counts down to 1e-40 of the values, however small they are. The
  precision exceeds the digits of the constants.
- One point at which they differ decides. Equality takes `FEWEST` points.
- The seed is the text of both sides, so that no expression can be made to fit the points.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef
from sympy.polys.polyerrors import CoercionFailed

from gapo_megatron.rewards.math.limits import check_size, expands_too_far

FEWEST = 3
"""Points at which equal expressions must agree; fewer say nothing."""

_SIZES = ((11, 1000), (1110, 4000), (5000, 30_000), (100_000, 10_000_000))  # of 1009ths
_ROUNDS = 2  # of both signs in all sizes
_WHOLE = [3, 1, 4, 2, 7, 5, 12, 6, 9, 8, 10, 11]
_DIGITS = 50  # beyond those of the constants; rounding may take half of them
_MOST_DIGITS = 1_000
_DECIMAL_ERROR = (
    1.000001e-6  # if a side has a decimal, which may be rounded: relative, as `agree` says
)
_MOST_EXPONENT = 2**16  # in bits; larger powers take long
_LARGEST = 2**10  # bits of an argument of a function; sinh(sinh(sinh(5))) has more
_STEPS = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.sign, sympy.Max, sympy.Min, sympy.Piecewise)
"""Functions by which two sides may differ in so small a region that no point is in it."""

Point = dict[Any, Any]
"""A number for each letter."""
_Value = Callable[[int], Any]
"""A number to some digits; None where there is none."""
_Side = Callable[[Point], _Value]


class UndecidedError(Exception):
    """Two values can neither be told apart nor be shown to be equal."""


class _NoValueError(Exception):
    """A kind of expression that is not evaluated here, such as an integral."""


class _OutsideError(Exception):
    """A point is outside of the domain."""


def is_expression(value: Any) -> bool:
    """Whether it is an expression: no equation, set or matrix."""
    return isinstance(value, sympy.Expr) and not value.is_Matrix


def has_values(value: Any) -> bool:
    """Whether it has values at enough points; True if it is not evaluated here."""
    try:
        return not is_expression(value) or not _Sides(value, value).are_few
    except _NoValueError:
        return True


def varies(value: Any) -> bool:
    """Whether its values at two points differ; True if it is not evaluated here."""
    try:
        sides = _Sides(value, value)
        found = [sides.ours(at) for at in sides.points]
        return not found or not all(sides.agree(found[0], other) for other in found)
    except _NoValueError:
        return True


def same_values(ours: Any, theirs: Any) -> bool | None:
    """Compare expressions with letters; None if they are not evaluated here.

    Raises:
        UndecidedError: they agree, but at too few points, or have steps.
    """
    try:
        sides = _Sides(ours, theirs)
        outcomes = [sides.agree(sides.ours(at), sides.theirs(at)) for at in sides.points]
    except _NoValueError:
        return None
    if False in outcomes or (outcomes.count(True) < sides.fewest and not sides.are_few):
        return False  # or it has no value where the reference has
    if sides.are_few or ours.has(*_STEPS) or theirs.has(*_STEPS):
        raise UndecidedError(f"{ours} and {theirs} agree where they were compared, but may differ")
    return True


def same_relation(ours: Any, theirs: Any) -> bool | None:
    """Compare equations or inequalities of one kind; None if they are not evaluated here.

    True if the difference of the sides of one is that of the other times a constant, which is
    positive for inequalities, and for equations with the same zeros. What is true or false nearly
    everywhere, as 0 = 0, is no other equation.

    Raises:
        UndecidedError: no zeros were found.
    """
    one, other = (_exact(each.lhs - each.rhs) for each in (ours, theirs))
    try:
        sides = _Sides(one / other, other) if other else None
        points = [at for at in sides.points if sides.ours(at)(sides.digits)] if sides else []
        if sides is None or len(points) < FEWEST:
            return False
        if sides.agree(sides.theirs(points[0]), lambda _: mpmath.mpf(0)):
            raise UndecidedError("the reference is true everywhere")
        first, *others = (sides.ours(at) for at in points)
        if any(sides.agree(quotient, lambda _: mpmath.mpf(0)) for quotient in (first, *others)):
            return False
        is_multiple = all(sides.agree(first, quotient) for quotient in others)
        ratio = first(sides.digits)
        if is_multiple or not isinstance(ours, sympy.Eq):
            return is_multiple and (isinstance(ours, sympy.Eq | sympy.Ne) or ratio.real > 0)
        if (same := _same_roots(one, other)) is not None:
            return same
        if expands_too_far(one) and not expands_too_far(other):
            return False
        return _same_zeros(one, other)
    except _NoValueError:
        return None


def _exact(value: Any) -> Any:
    """Decimals as fractions: zeros are compared exactly."""
    return value.xreplace({one: sympy.Rational(str(one)) for one in value.atoms(sympy.Float)})


class _Sides:
    """Two expressions and the points at which they are compared: those where `theirs` has a value.

    Undefined functions and derivatives, f(x) or dy/dx, are letters of that name.
    """

    def __init__(self, ours: Any, theirs: Any) -> None:
        names = {
            one for each in (ours, theirs) for one in each.atoms(AppliedUndef, sympy.Derivative)
        }
        letters = {name: sympy.Symbol(str(name), real=True) for name in names}
        ours, theirs = ours.xreplace(letters), theirs.xreplace(letters)
        self.ours: _Side = lambda at: functools.partial(_value, ours, at)
        self.theirs: _Side = lambda at: functools.partial(_value, theirs, at)
        self.letters = sorted(ours.free_symbols | theirs.free_symbols, key=str)
        self.fewest = FEWEST if self.letters else 1
        self._varies = bool(theirs.free_symbols)  # a number is compared as such, as in `plain`
        self.is_rough = any(one.atoms(sympy.Float) for one in (ours, theirs))
        bits = max(check_size(ours), check_size(theirs))
        self.digits = min(_MOST_DIGITS, _DIGITS + int(bits * 0.61))
        whole = zip(
            *(_WHOLE[5 * k % 12 :] + _WHOLE for k, _ in enumerate(self.letters)), strict=False
        )
        for points in (
            self._random_points(f"{ours} {theirs}"),
            [dict(zip(self.letters, map(Fraction, row), strict=True)) for row in whole][:12],
        ):
            self.points = [at for at in points if self.theirs(at)(self.digits) is not None]
            self.are_few = len(self.points) < self.fewest
            if not self.are_few:
                break

    def agree(self, left: _Value, right: _Value) -> bool | None:
        """Whether two values are equal; None if one of them does not exist."""
        one, other = left(self.digits), right(self.digits)
        if one is None or other is None:
            return None
        error, size = abs(one - other), max(abs(one), abs(other))
        if self.is_rough:
            return bool(error <= _DECIMAL_ERROR * (size if self._varies else min(1, size)))
        if error <= size * mpmath.mpf(10) ** (10 - self.digits):
            return True
        one, other = left(2 * self.digits), right(2 * self.digits)
        return bool(abs(one - other) <= error * mpmath.mpf(10) ** (-self.digits // 2))

    def _random_points(self, seed: str) -> list[Point]:
        rng = random.Random(seed)
        if not self.letters:
            return [{}]
        kinds = [(sign, size) for sign in (-1, 1) for size in _SIZES] * _ROUNDS
        rows: list[Any] = [[(1, size)] * len(self.letters) for size in _SIZES]
        rows += zip(*(rng.sample(kinds, len(kinds)) for _ in self.letters), strict=True)
        return [
            {
                x: sign * Fraction(rng.randint(*size), 1009)
                for x, (sign, size) in zip(self.letters, row, strict=True)
            }
            for row in rows
        ]


def _value(value: Any, point: Point, digits: int) -> Any:
    with mpmath.workdps(digits):
        try:
            found = _evaluate(value, point)
        except (_OutsideError, ArithmeticError, ValueError):  # such as a pole
            return None
        return found if mpmath.isfinite(found) else None


_OWN_NAMES: dict[str, Callable[..., Any]] = {
    **{"Abs": abs, "conjugate": mpmath.conj, "factorial2": mpmath.fac2, "ceiling": mpmath.ceil},
    **{"Max": max, "Min": min, "Mod": mpmath.fmod, "UnevaluatedExpr": lambda one: one},
}
_CONSTANTS = {
    sympy.pi: mpmath.pi, sympy.E: mpmath.e, sympy.I: 1j, sympy.EulerGamma: mpmath.euler,
    sympy.GoldenRatio: mpmath.phi,
}  # fmt: skip


def _evaluate(value: Any, point: Point) -> Any:
    """The value at a point, in mpmath's precision; an mpc only if it is not real."""
    if value in point:
        number = point[value]
        is_fraction = isinstance(number, Fraction)
        return mpmath.mpf(number.numerator) / number.denominator if is_fraction else number
    if value.is_Rational:
        return mpmath.mpf(value.p) / value.q
    if value.is_Float:
        return mpmath.mpf(str(value))
    if value in _CONSTANTS:
        return mpmath.mpmathify(_CONSTANTS[value])
    name = type(value).__name__
    if isinstance(value, sympy.Pow | sympy.exp):
        found = _power(value, *(_evaluate(one, point) for one in value.as_base_exp()))
    elif value.is_Add or value.is_Mul:
        parts = [_evaluate(one, point) for one in value.args]
        found = mpmath.fsum(parts) if value.is_Add else mpmath.fprod(parts)
    elif function := _OWN_NAMES.get(name) or (value.is_Function and getattr(mpmath, name, None)):
        parts = [_evaluate(one, point) for one in value.args]
        if any(one and mpmath.mag(one) > _LARGEST for one in parts):
            raise _OutsideError
        found = mpmath.mpmathify(function(*parts))
        is_complex = any(isinstance(one, mpmath.mpc) for one in (*parts, found))
        has_branches = name in ("log", "loggamma", "LambertW") or name.startswith("a")  # acos
        if is_complex and has_branches and value.free_symbols:
            raise _OutsideError
    else:
        raise _NoValueError
    return found.real if isinstance(found, mpmath.mpc) and found.imag == 0 else found


def _power(value: Any, base: Any, exponent: Any) -> Any:
    """A power that is no matter of convention, or of constants."""
    if abs(exponent) * (1 + abs(mpmath.mag(base) if base else 0)) > _MOST_EXPONENT:
        raise _OutsideError
    is_real = not isinstance(base, mpmath.mpc)
    if not isinstance(exponent, mpmath.mpc) and exponent == int(exponent):
        return base ** int(exponent)
    if is_real and (base > 0 or (base == 0 and mpmath.re(exponent) > 0)):
        return mpmath.power(base, exponent)
    root = value.as_base_exp()[1]
    if is_real and root.is_Rational and root.q % 2:
        return (-1) ** root.p * mpmath.power(-base, exponent)
    if value.free_symbols:
        raise _OutsideError
    return mpmath.power(base, exponent)


def _same_roots(one: Any, other: Any) -> bool | None:
    """Whether two polynomials have the same real zeros; None if they are none or too large.

    Compares their roots in each letter, with random values for the others.
    """
    letters = sorted(one.free_symbols, key=str)
    rng = random.Random(0)
    for letter in letters:
        point = {x: sympy.Rational(rng.randint(-2900, 2900), 1009) for x in letters if x != letter}
        values = [value.subs(point) for value in (one, other)]
        if any(map(expands_too_far, values)):
            return None
        try:
            ours, theirs = (sympy.Poly(one, letter, domain="QQ").sqf_part() for one in values)
        except (sympy.PolynomialError, CoercionFailed):
            return None
        common = ours.gcd(theirs)
        alone = [line.quo(common) for line in (ours, theirs)]
        if any(line.count_roots() for line in alone):
            return False
        if not common.count_roots() and any(line.degree() for line in alone):
            return False  # other complex roots, and none that is real
    return True


def _same_zeros(one: Any, other: Any) -> bool:
    """Compare the zeros that a search from the points finds in each letter.

    It searches the quotients too: a further factor is alone there, and its zeros are found.
    """
    sides, quotients = _Sides(one, other), _Sides(one / other, other / one)
    ways = [
        (sides.ours, sides.theirs, quotients.ours), (sides.theirs, sides.ours, quotients.theirs)
    ]  # fmt: skip
    counts = []
    for letter, (mine, its, quotient) in itertools.product(sides.letters, ways):
        searched = itertools.product((mine, quotient), sides.points)
        found = (_zero_near(side, at, letter, sides.digits) for side, at in searched)
        zeros = [at for at in found if at and _is_zero(mine, at, letter, sides.digits)]
        outcomes = [_is_zero(its, at, letter, sides.digits) for at in zeros]
        if False in outcomes:
            return False
        counts.append(outcomes.count(True))
    if any(map(min, zip(counts[::2], counts[1::2], strict=True))):
        return True
    raise UndecidedError("no zeros of the equations were found")


def _zero_near(side: _Side, at: Point, letter: Any, digits: int) -> Point | None:
    """A zero of one letter, searched from a point; None if none is found."""

    def value(number: Any) -> Any:
        found = side({**at, letter: number})(digits)
        if found is None or isinstance(found, mpmath.mpc):
            raise ValueError
        return found

    start = float(at[letter])
    with mpmath.workdps(digits), contextlib.suppress(ValueError, ZeroDivisionError):
        tolerance = mpmath.mpf(10) ** (-3 * digits // 2)
        root = mpmath.findroot(value, (start, 1.25 * start), tol=tolerance, maxsteps=40)
        return {**at, letter: root}
    return None


def _is_zero(side: _Side, at: Point, letter: Any, digits: int) -> bool | None:
    """Whether the value at a zero of the other side is small beside that near it."""
    with mpmath.workdps(digits):
        near = {**at, letter: at[letter] + mpmath.mpf(10) ** (-digits // 2)}
    value, beside = side(at)(digits), side(near)(digits)
    if value is None or beside is None:
        return None
    return bool(abs(value) <= abs(beside) * mpmath.mpf(10) ** (-digits // 5))
