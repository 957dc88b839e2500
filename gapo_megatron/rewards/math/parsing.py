"""Parses text to sympy objects by math-verify: all of the text or nothing.

Its own extraction, units and reading of letters are switched off or prepared for.
"""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
from latex2sympy2_extended.logic import And
from sympy.core.relational import Relational

from gapo_megatron.compat.latex2sympy import parse_latex
from gapo_megatron.rewards.math import plain
from gapo_megatron.rewards.math.functions import bracketed
from gapo_megatron.rewards.math.spelling import FUNCTIONS, THOUSANDS, brace
from gapo_megatron.rewards.math.units import RADIANS

MOST_DEPTH = 20
"""Deepest nesting of brackets: parsing time grows fast with it. DeepScaleR's references reach 6."""

MOST_TOKENS = 300
"""Most numbers, commands and other signs: 1,000 take seconds to parse. The references reach 103."""

MOST_BARS = 12
"""Most bars: each may open or close, and the parser tries both. The references reach 4."""

_AS_IT_IS = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=True,
    boxed="none",
    equations=False,
)


_PLAIN_FUNCTION = re.compile(rf"(?<![\\a-zA-Z])(?<!_\{{)({FUNCTIONS}|sqrt|pi)(?![a-zA-Z])")
_REFUSED = re.compile(
    r"\\ldots|!!!|[\d)}]\s*_|(?<![\^_\d])\d+(?:\s+|\s*\{\s*)\d|\d\.\d*\.\d|[?#@°']|\\text(?!\s*\{)"
    r"|\\approx|\\(?:not|pm|mp)(?![a-zA-Z])|,0\d|\\Gamma(?!\s*\()|\\(?:h?phantom|n?exists|lnot|neg)"
)
_DEGREES = re.compile(r"(?<=[\d)}])\s*°(?!\s*[CF])")
_OR = re.compile(r"(?<![a-zA-Z\\])or(?![a-zA-Z])|\\cup(?![a-zA-Z])", re.IGNORECASE)
_AND_OR = re.compile(r"\s*,?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
_BOTH = re.compile(r",|(?<![a-zA-Z\\])and(?![a-zA-Z])", re.IGNORECASE)
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\||:)\s*(.+)\\\}", re.DOTALL
)


@functools.lru_cache(maxsize=4096)
def read(text: str, has_cases: bool) -> Any:
    """Parse all of `text`; None if it cannot be parsed."""
    # Conditions, alone or in a set, joined by words: their sets of solutions.
    if (builder := _BUILDER.fullmatch(text)) and RELATION.search(builder[2]):
        text = builder[2]
    for joint, join in ((_OR, sympy.Union), (_BOTH, sympy.Intersection)):
        parts = joint.split(text)
        if len(parts) < 2 or not all(RELATION.search(part) or "=" in part for part in parts):
            continue
        if not any(map(RELATION.search, parts)):
            continue  # x = 1 or x = 2 is a list
        conditions = [read(part.strip(" ,;"), has_cases) for part in parts]
        if len(set().union(*(getattr(one, "free_symbols", ()) for one in conditions))) > 1:
            continue
        sets = [as_set(one) for one in conditions]
        joined = None if None in sets else join(*sets)
        if joined is not None and joined is not sympy.S.EmptySet:
            return joined
        if join is sympy.Union:
            return None
    return _parse(_AND_OR.sub(", ", text), has_cases)


def as_set(value: Any) -> Any:
    """The set of solutions of a condition on one letter; None if it cannot be found."""
    if isinstance(value, sympy.Set):
        return value
    if isinstance(value, sympy.Eq) and isinstance(value.rhs, sympy.Set):
        return value.rhs
    if isinstance(value, And):
        sets = [_half_line(one) for one in value._unsorted_args]
        if sets and None not in sets and len(value.free_symbols) == 1:
            return sympy.Intersection(*sets)
        value = sympy.And(*value._unsorted_args)
    try:
        return _half_line(value) or value.as_set()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _half_line(value: Any) -> Any:
    """The solutions of a comparison of a letter with a number; None for other conditions.

    A hundred times as fast as sympy's solver.
    """
    if not isinstance(value, Relational) or isinstance(value, sympy.Eq | sympy.Ne):
        return None
    if value.rhs.is_Symbol:
        value = value.reversed
    bound = value.rhs
    if not (value.lhs.is_Symbol and bound.is_number and bound.is_extended_real):
        return None
    if isinstance(value, sympy.StrictLessThan | sympy.LessThan):
        return sympy.Interval(-sympy.oo, bound, True, isinstance(value, sympy.StrictLessThan))
    return sympy.Interval(bound, sympy.oo, isinstance(value, sympy.StrictGreaterThan), True)


def _prepare(text: str) -> str | None:
    """Rewrite what math-verify would misread; None if it would ignore a part."""
    # One spelling, as the parser expects it.
    text = _join_thousands(text).removesuffix("%")  # 50% is 50
    text = _SEMICOLON.sub(r"\1,\2", text)
    text = text.replace("\\pi (", "\\pi(").replace("\\pi(", "\\pi \\cdot (")  # not a function
    if not RADIANS.search(text):  # 60° is 60
        text = _DEGREES.sub(" ", text)
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text)
    text = brace(text) if "\\sqrt " in text else text
    text = _EXPONENT_FIRST.sub(r"\2\1", text)
    text = _MIXED.sub(_mixed, text)
    text = re.sub(r"([A-Za-z])('+)", lambda m: f"{m[1]}_{{{'p' * len(m[2])}}}", text)
    text = _EXPONENT_T.sub(r"^\1 T", text)
    # Nothing that the parser ignores or takes long for.
    bars = text.count("|")
    if _REFUSED.search(text) or bars % 2 or bars > MOST_BARS:  # x|_{x=0} is no absolute value
        return None
    if len(_TOKEN.findall(text)) > MOST_TOKENS:
        return None
    text = _FACTORS.sub(r"\g<0> \\cdot ", bracketed(_with_plain_letters(text)))
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        return None
    return text


_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+|[^\s\d]")
_EXPONENT_FIRST = re.compile(r"(?<=[a-zA-Z])(\^(?:\{[^{}]*\}|\w))(_(?:\{[^{}]*\}|\w))")
_SEMICOLON = re.compile(r"([(\[][^()\[\],;]*);([^()\[\],;]*[)\]])")
# Without the space it would be a transposition, which is ignored except of a matrix.
_EXPONENT_T = re.compile(r"(?<!matrix\})\^(\{?)T")
# math-verify adds neighbouring numbers: 2(3) is 5. But not x_1(t), \sin^2(x).
_FACTORS = re.compile(r"(?:\)|(?<![\^_\d.])\d+(?:\.\d+)?)(?=\s*\()|\)(?=\s*\d)")
_MIXED = re.compile(r"(?<![\w.^}])(\d+)\s*(\\frac\s*\{(\d+)\}\s*\{(\d+)\})")


def _mixed(match: re.Match[str]) -> str:
    """A mixed number 3 3/4 as a sum; 3 4/3 is a product."""
    return f"({match[1]}+{match[2]})" if int(match[3]) < int(match[4]) else match[0]


_CALCULUS = re.compile(
    r"\\i*(?:int|oint)(?![a-zA-Z])|\\d?frac\s*\{\s*d[^{}]*\}\s*\{\s*d\s*(?:[a-zA-Z]|\\[a-zA-Z])"
)
_NO_FACTOR = (
    r"_\s*\{[^{}]*\}|\\(?:begin|end|text|mathrm|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+|_\s*I"
)
_OWN_LETTER = re.compile(
    rf"{_NO_FACTOR}|(?P<letter>I|[eE](?=\s*_)|d(?=\s*(?P<of>[a-zA-Z]|\\[a-zA-Z]+)))"
)
_VARIABLES = frozenset((*"rstuvwxyzRSTUVWXYZ", "\\theta", "\\phi"))


def _with_plain_letters(text: str) -> str:
    r"""Mark I, e_1 and a factor d as variables.

    math-verify reads I as the imaginary unit, e in e_1 as a number, 8dt as 8 times a differential
    and d\sqrt2 as dsqrt. d stays a differential in integrals, derivatives and beside another one.
    """
    found = {match["of"] for match in _OWN_LETTER.finditer(text)}
    has_differentials = _CALCULUS.search(text) or len(_VARIABLES & found) > 1

    def plain_letter(match: re.Match[str]) -> str:
        is_own = match["letter"] and not (match["of"] and has_differentials)
        return f"\\text{{{match['letter']}}}" if is_own else match[0]

    return _OWN_LETTER.sub(plain_letter, text)


_COMMA = re.compile(rf"\\?[{{}}]|[()\[\]]|{THOUSANDS.pattern}")


def _join_thousands(text: str) -> str:
    """Remove separators of thousands, except in parentheses, where a comma ends an element."""
    parts, depth, end = [], 0, 0
    for token in _COMMA.finditer(text):
        depth += (token[0] in ("(", "[", "\\{")) - (token[0] in (")", "]", "\\}"))
        if token[0] == "," and depth == 0:
            parts.append(text[end : token.start()])
            end = token.end()
    return "".join((*parts, text[end:]))


_IMAGINARY = sympy.Symbol("i", real=True)


def _parse(text: str, has_cases: bool) -> Any:
    # Plain numbers need no parser, which is slow.
    plain_number = plain.number(text)
    if plain_number and not (plain_number.unit or plain_number.is_percent):
        value = plain_number.value * plain_number.magnitude
        exact = sympy.Rational(value.numerator, value.denominator)
        return exact.evalf() if plain_number.is_decimal else exact
    prepared = _prepare(text)
    if prepared is None:
        return None
    try:
        value = _latex(prepared, has_cases)
        if "!!" in prepared and "!)" not in prepared:  # (3!)! is read as it should
            found = [n for n in value.atoms(sympy.factorial) if n.args[0].func is sympy.factorial]
            value = value.xreplace({n: sympy.factorial2(n.args[0].args[0]) for n in found})
    except Exception:  # latex2sympy raises a bare Exception for a syntax error
        return None
    if value is None or value in (sympy.nan, sympy.zoo):
        return None
    # i as the imaginary unit, and dy/dx as a letter.
    if isinstance(value, sympy.Basic | sympy.MatrixBase) and value.has(_IMAGINARY):
        with contextlib.suppress(ValueError, TypeError):  # an interval up to i
            if isinstance(value, sympy.Eq):
                sides = [side.subs(_IMAGINARY, sympy.I) for side in (value.lhs, value.rhs)]
                value = sympy.Eq(*sides, evaluate=False)
            else:
                value = value.subs(_IMAGINARY, sympy.I)
    if isinstance(value, sympy.Basic):  # sympy evaluates dy/dx to 0: y depends on nothing
        letters = [one for one in value.atoms(sympy.Derivative) if one.expr.is_Symbol]
        value = value.xreplace({one: sympy.Symbol(str(one), real=True) for one in letters})
    return value


def _latex(text: str, has_cases: bool) -> Any:
    # Letters are real on both sides: sympy distinguishes real letters from others.
    return parse_latex(normalize_latex(text, _AS_IT_IS), lowercase_symbols=not has_cases)
