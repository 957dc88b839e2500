"""Compares expressions and equations by their values at random points."""

from __future__ import annotations

import random
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.polys.polyerrors import CoercionFailed

from gapo_megatron.rewards.math.limits import expands_too_far


def has_decimals(*values: Any) -> bool:
    """Whether one of the values contains a decimal."""
    return any(atom.is_Float for value in values for atom in value.atoms())


def is_expression(value: Any) -> bool:
    """Whether it is an expression: no equation, set or matrix."""
    return isinstance(value, sympy.Expr) and not value.is_Matrix


_STEPS = (
    sympy.floor, sympy.ceiling, sympy.Mod, sympy.sign, sympy.Sum, sympy.Product, sympy.Derivative,
    sympy.Integral, sympy.Limit, AppliedUndef, sympy.UnevaluatedExpr,
)  # fmt: skip


def same_at_random(ours: Any, theirs: Any) -> bool | None:
    """Compare values at random points; None if that does not decide."""
    letters = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    if not letters:
        return None
    if ours.has(*_STEPS) or theirs.has(*_STEPS) or has_decimals(ours, theirs):
        return None
    rng = random.Random(0)
    agreed = 0
    for sign in (1, 1, 1, 1, -1):
        point = {letter: sign * sympy.Rational(rng.randint(1100, 2900), 1009) for letter in letters}
        if sign < 0 and any(_is_branched(one, point) for one in (ours, theirs)):
            continue
        values = [one.subs(point).evalf(30) for one in (ours, theirs)]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        error = abs(values[0] - values[1])
        if error > 10**-15 * max(1, abs(values[1])):
            return False
        agreed += 1
    return True if agreed >= 3 else None


def _is_branched(value: Any, point: dict[Any, Any]) -> bool:
    """Whether it has a root or logarithm of a negative number, whose branch is a convention."""
    inside = [one.base for one in value.atoms(sympy.Pow) if not one.exp.is_integer]
    inside += [one.args[0] for one in value.atoms(sympy.log)]
    return any(not one.subs(point).evalf().is_nonnegative for one in inside)


def same_equation(ours: Any, theirs: Any) -> bool | None:
    """Compare equations: True if one is a multiple of the other; None if undecided."""
    if not all(is_expression(side) for one in (ours, theirs) for side in (one.lhs, one.rhs)):
        return None
    one, other = ours.lhs - ours.rhs, theirs.lhs - theirs.rhs
    if one.free_symbols != other.free_symbols:
        return None
    if same_at_random(one, other) or same_at_random(one, -other):
        return True
    if not other.free_symbols or one.has(*_STEPS) or other.has(*_STEPS):
        return None
    point = {
        letter: sympy.Rational(1234, 1009) + place
        for place, letter in enumerate(sorted(one.free_symbols, key=str))
    }
    at_point = other.subs(point).evalf(40)
    if at_point.is_finite and at_point != 0:
        factor = one.subs(point) / other.subs(point)
        if same_at_random(one, factor * other):
            return True
    if (same := _same_zeros(one, other)) is not None:
        return same
    # math-verify equates any two equations without a solution.
    return None if len(one.free_symbols) > 1 or sympy.solve(theirs) else False


def _same_zeros(one: Any, other: Any) -> bool | None:
    """Whether two polynomials in the same letters have the same real zeros.

    Compares their roots in each letter, with random values for the others. None if they are not
    polynomials with rational coefficients, are too large, or differ only in complex roots.
    """
    if has_decimals(one, other):  # they may be rounded
        return None
    letters = sorted(one.free_symbols, key=str)
    rng = random.Random(0)
    for letter in letters:
        point = {
            other: sympy.Rational(rng.randint(-2900, 2900), 1009)
            for other in letters
            if other != letter
        }
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
        if any(line.degree() > 0 for line in alone):
            return None
    return True


__all__ = ["has_decimals", "is_expression", "same_at_random", "same_equation"]
