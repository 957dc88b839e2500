"""Compares expressions, equations and sets: by values where possible, else by math-verify.

`parsing` reads them with math-verify; `limits` tells what would take too long.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.logic import And
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from gapo_megatron.rewards.math import parsing, plain, points
from gapo_megatron.rewards.math.limits import TooLargeError, check_size, expands_too_far
from gapo_megatron.rewards.math.points import UndecidedError, is_expression
from gapo_megatron.rewards.math.units import split_unit


def equal(given: str, reference: str) -> bool | None:
    """Whether two expressions are equal; None if the reference cannot be read or is too large."""
    given = _with_names_of(given, reference)
    if plain.numeral(reference) and "_" in reference:
        return False  # the reference is a numeral with a base, the answer is not
    has_cases = _has_cases(given) or _has_cases(reference)
    theirs, ours = _read(reference, has_cases), _read(given, has_cases)
    if theirs is None or ours is None:
        return None if theirs is None else False
    # What math-verify would accept: work left to do, false or stated values, sets as points.
    if (_unfinished(ours) and not _unfinished(theirs)) or _is_false(ours):
        return False
    if "=" in given and "=" not in reference and isinstance(ours, sympy.Eq | And):
        return False  # `comparison` has tried the sides of the equation
    for text, one, other in ((given, ours, theirs), (reference, theirs, ours)):
        is_set = text.startswith("\\{") and isinstance(one, sympy.FiniteSet)
        if is_set and isinstance(other, sympy.Interval | sympy.Tuple):
            return False  # math-verify equates {1, 2} and (1, 2)
    return _equal_values(ours, theirs)


def _read(text: str, has_cases: bool) -> Any:
    """Parse an expression; None if it cannot be read or is too large."""
    value = parsing.read(text, has_cases)
    try:
        check_size(value)
    except TooLargeError:
        return None
    return value


def is_readable(text: str) -> bool:
    """Whether an expression can be read, is not too large, and has values to compare."""
    value = _read(text, _has_cases(text))
    return value is not None and points.has_values(value)


def names(text: str, reference: str) -> bool:
    """Whether an expression may name any value: it has letters that `reference` does not have.

    So may an integral, a limit and a series, because evaluating them may take forever.
    """
    has_cases = _has_cases(text + reference)
    value, other = parsing.read(text, has_cases), parsing.read(reference, has_cases)
    if not isinstance(value, sympy.Basic) or isinstance(value, sympy.Eq | And):
        return False
    if _unfinished(value) or (value.has(sympy.Sum) and value.has(sympy.oo)):
        return True
    others = _names_in(other) if isinstance(other, sympy.Basic) else set()
    return bool(_names_in(value) - others) and (not is_expression(value) or points.varies(value))


def _names_in(value: Any) -> set[Any]:
    """Letters and undefined functions of an expression."""
    return value.free_symbols | {one.func for one in value.atoms(AppliedUndef)}


def rounds(exact: str, rounded: str) -> bool:
    """Whether `rounded` is `exact`, rounded to its number of digits."""
    value, number = parsing.read(split_unit(exact)[0], False), plain.number(rounded)
    if number is None or not getattr(value, "is_number", False):
        return False
    scale = 100 if number.is_percent and "%" not in exact else 1
    places = len(decimals[1]) if (decimals := re.search(r"\.(\d+)", rounded)) else 0
    error = abs(value.evalf() * scale / number.magnitude - sympy.Rational(str(number.value)))
    is_fraction = number.value.denominator > 1 and not number.is_decimal  # 22/7
    most = abs(number.value) / 1000 if is_fraction else Fraction(1, 2 * 10**places)
    return bool(error.is_real and error <= sympy.Rational(str(most)))


def forget() -> None:
    """Clear the caches of sympy and of `parsing`."""
    parsing.read.cache_clear()
    sympy.core.cache.clear_cache()


_TWO_READINGS = (
    # Letters after a number and a space: a unit or factors. The denominator of 1/2x. x^y^z.
    (re.compile(r"(.*[\d}])\s+([mgshlLNJWVAKCF]|hr|lb|m[gils]|rs)"), r"\1", r"\1 \\cdot \2"),
    (re.compile(r"(.*?)(\d+)/(\d+)\s*([a-zA-Z(].*)"), r"\1\\frac{\2}{\3}\4", r"\1\\frac{\2}{\3\4}"),
    (re.compile(r"(\w+)\^(\w+)\^(\w+)"), r"\1^{\2^{\3}}", r"(\1^{\2})^{\3}"),
)


def readings(reference: str) -> tuple[str, str] | None:
    """Two readings of an ambiguous cleaned reference; None if it has only one."""
    for pattern, one, other in _TWO_READINGS:
        if match := pattern.fullmatch(reference):
            return match.expand(one), match.expand(other)
    return None


def _has_cases(text: str) -> bool:
    r"""Whether the case of letters matters: a letter occurs in both, as R - r, or I or \Pi does."""
    letters = set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)))
    if "I" in letters or re.search(r"\\[A-Z]", text):
        return True
    return any(one.upper() in letters for one in letters if one.islower())


_DEFINITION = re.compile(
    r"\s*(?P<name>[A-Za-z])\s*(?:\(\s*(?P<of>[A-Za-z])\s*\)|_\s*\{?\s*(?P<index>[a-z])\s*\}?)"
    r"\s*=\s*(?P<value>.+)",
    re.DOTALL,
)
_NAMED = re.compile(r"\s*([A-Za-z])\s*=\s*(.+)", re.DOTALL)


def _with_names_of(given: str, reference: str) -> str:
    """Rename the argument of a definition as in the reference: f(t) to f(x), a_k to a_n."""
    ours, theirs = _DEFINITION.fullmatch(given), _DEFINITION.fullmatch(reference)
    named = _NAMED.fullmatch(given if ours is None else reference)
    if ours is None:
        is_y = theirs and theirs["of"] and named and named[1] == "y"
        return f"{theirs['name']}({theirs['of']})={named[2]}" if is_y else given  # type: ignore[index]
    name, value, argument = ours["name"], ours["value"], ours["of"] or ours["index"]
    if theirs and bool(ours["of"]) == bool(theirs["of"]):
        new = theirs["of"] or theirs["index"]
        is_index = ours["index"] and argument not in _letters(value)  # v_x = 3 is not v_y = 3
        renamed = None if is_index else _renamed(value, argument, new)
        left = f"{name}({new})" if ours["of"] else f"{name}_{{{new}}}"
        return given if renamed is None else f"{left}={renamed}"
    if named and ours["of"] and named[1] == "y" and len(letters := _letters(named[2])) == 1:
        renamed = _renamed(value, argument, letters.pop())
        return given if renamed is None else f"y={renamed}"
    return given


def _letters(text: str) -> set[str]:
    return set(
        re.findall(r"(?<!\\)\b[a-zA-Z]\b|(?<=\d)[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", " ", text))
    ) - {"e", "i"}


def _renamed(text: str, old: str, new: str) -> str | None:
    """Rename `old` to `new`; None if `new` is already used."""
    if old == new:
        return text
    if new in re.sub(r"\\[a-zA-Z]+", "", text):
        return None
    return re.sub(rf"\\[a-zA-Z]+|{old}", lambda m: new if m[0] == old else m[0], text)


def _unfinished(value: Any) -> bool:
    """Whether it contains an integral or limit, which may take forever to evaluate."""
    return bool(getattr(value, "has", None)) and value.has(sympy.Integral, sympy.Limit)


def _is_false(value: Any) -> bool:
    """Whether it contains an equation of two different numbers: x = 43 = 42."""
    equations = value._unsorted_args if isinstance(value, And) else [value]
    return any(
        isinstance(one, sympy.Eq) and not one.free_symbols and not _equal_values(one.lhs, one.rhs)
        for one in equations
    )


def _equal_values(ours: Any, theirs: Any) -> bool:
    if type(ours) is type(theirs) and ours == theirs:
        return True
    ours, theirs = _ends(ours), _ends(theirs)
    if (parts := _parts(ours, theirs)) is not None:
        return all(_equal_values(*pair) for pair in parts)
    # As in math-verify: y = 5 is 5, but 5 is not 2y = 5.
    if isinstance(ours, sympy.Eq) and is_expression(theirs):
        return _equal_values(ours.rhs, theirs)
    if isinstance(theirs, sympy.Eq) and _is_solved(theirs) and is_expression(ours):
        return _equal_values(ours, theirs.rhs)
    if is_expression(ours) and is_expression(theirs):
        return _equal_expressions(ours, theirs)
    # Equations and conditions by their zeros or multiples, or by the numbers that meet them.
    if isinstance(ours, And | Relational) and isinstance(theirs, And | Relational):
        return _equal_relations(ours, theirs)
    if expands_too_far(ours) and not expands_too_far(theirs):
        return False
    ours_is_range = isinstance(ours, sympy.Interval | And | Relational)
    other = theirs if ours_is_range else ours if _is_range(theirs) else None
    if isinstance(other, sympy.FiniteSet | sympy.Tuple):  # to math-verify 1 < x < 2 is 1, 2
        return False
    # `Pool` limits the time: an alarm cannot interrupt C code.
    options = {"raise_on_error": True, "allow_set_relation_comp": True}
    return bool(math_verify.verify([theirs], [ours], timeout_seconds=None, **options))


def _is_range(reference: Any) -> bool:
    """Whether it is a condition such as 1 < x < 2, or an interval that is no point (1, 2)."""
    if isinstance(reference, And):
        return any(map(_is_range, reference.args))
    if isinstance(reference, sympy.Eq):  # x in (1, 2) is read as x = (1, 2)
        return isinstance(reference.rhs, sympy.Interval | sympy.Union)
    is_infinite = isinstance(reference, sympy.Interval) and reference.measure == sympy.oo
    return isinstance(reference, Relational) or is_infinite


def _equal_expressions(ours: Any, theirs: Any) -> bool:
    """Compare values at random points; ask for a proof if these do not decide."""
    if ours.is_number and theirs.is_number:
        ours, theirs = ours.doit(), theirs.doit()
    if ours.is_Rational and theirs.is_Rational:
        return bool(ours == theirs)
    try:
        same = points.same_values(ours, theirs)
    except UndecidedError:
        if _is_proved(ours, theirs):
            return True
        raise
    return _is_proved(ours, theirs) if same is None else same


def _is_proved(ours: Any, theirs: Any) -> bool:
    """Whether sympy can show that two expressions are equal."""
    if expands_too_far(ours) and not expands_too_far(theirs):
        return False
    return bool(sympy.simplify(ours - theirs) == 0)


def _equal_relations(ours: Any, theirs: Any) -> bool:
    """Conditions by the numbers that meet them, others by their zeros or multiples."""
    if _same_conditions(ours, theirs):
        return True
    if isinstance(ours, And) or isinstance(theirs, And):
        pairs = [getattr(one, "_unsorted_args", [one]) for one in (ours, theirs)]
        return len(pairs[0]) == len(pairs[1]) and all(map(_equal_relations, *pairs))
    ours, theirs = (
        one.reversed if isinstance(one, sympy.StrictGreaterThan | sympy.GreaterThan) else one
        for one in (ours, theirs)
    )
    if type(ours) is not type(theirs):
        return False
    sides = [(ours.lhs, theirs.lhs), (ours.rhs, theirs.rhs)]
    if not all(is_expression(side) for pair in sides for side in pair):
        return all(_equal_values(*pair) for pair in sides)
    if sides[0][0] == sides[0][1] and all(_is_solved(one) for one in (ours, theirs)):
        return _equal_values(*sides[1])
    return bool(points.same_relation(ours, theirs))


def _same_conditions(ours: Any, theirs: Any) -> bool:
    """Whether two conditions on one letter have the same solutions: 1 < x < 3 and 3 > x > 1."""
    if not all(isinstance(one, And | Relational) for one in (ours, theirs)):
        return False
    is_equation = isinstance(ours, sympy.Eq) and not isinstance(ours.rhs, sympy.Set)
    if is_equation or len(ours.free_symbols | theirs.free_symbols) != 1:
        return False
    sets = parsing.as_set(ours), parsing.as_set(theirs)
    return sets[0] is not None and sets[0] == sets[1]


def _parts(ours: Any, theirs: Any) -> list[tuple[Any, Any]] | None:
    """Pairs of parts that must be equal, for tuples, intervals and matrices; else None."""
    kinds = sympy.MatrixBase, sympy.Tuple, sympy.Interval
    is_alike = any(isinstance(ours, kind) and isinstance(theirs, kind) for kind in kinds)
    if isinstance(ours, sympy.MatrixBase) and is_alike:
        return list(zip(ours, theirs, strict=True)) if ours.shape == theirs.shape else None
    if isinstance(ours, sympy.Interval) and is_alike:
        ends = [(one.left_open, one.right_open) for one in (ours, theirs)]
        return [(ours.start, theirs.start), (ours.end, theirs.end)] if len({*ends}) == 1 else None
    if is_alike or isinstance(ours, sympy.MatrixBase) or isinstance(theirs, sympy.MatrixBase):
        columns = _column(ours), _column(theirs)
        return list(zip(*columns, strict=True)) if len(columns[0]) == len(columns[1]) > 0 else None
    return None


def _column(value: Any) -> list[Any]:
    """Entries of a vector, written as column or point; a point may be parsed as an interval."""
    if isinstance(value, sympy.MatrixBase):
        return list(value) if value.shape[1] == 1 else []
    if isinstance(value, sympy.Interval):
        return [value.start, value.end] if value.left_open and value.right_open else []
    return list(value) if isinstance(value, sympy.Tuple) else []


def _ends(value: Any) -> Any:
    """The first and the last side of a chain x = y = 5 of equations."""
    if not isinstance(value, And) or not all(isinstance(one, sympy.Eq) for one in value.args):
        return value
    chain = value._unsorted_args
    return sympy.Eq(chain[0].lhs, chain[-1].rhs, evaluate=False) if _is_solved(chain[0]) else value


def _is_solved(equation: Any) -> bool:
    """Whether its left side is only a name: a letter, letters such as AB, or f(x)."""
    names = sympy.Mul.make_args(equation.lhs)
    are_names = all(one.is_Symbol or isinstance(one, AppliedUndef) for one in names)
    return are_names and not (set(names) & equation.rhs.free_symbols)
