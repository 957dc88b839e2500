"""Expressions, equations, sets: math-verify parses and compares, within what it does right.

It is asked to read all of an answer or nothing of it, without its own units, extraction and
letters; and its comparison comes after what tells most answers apart at once: their values.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import (
    ConversionConfig,
    NormalizationConfig,
    latex2sympy,
    normalize_latex,
)
from latex2sympy2_extended.logic import And

from gapo_megatron.rewards.math import plain
from gapo_megatron.rewards.math.spelling import FUNCTIONS

MOST_BITS = 2**20
"""Of a value that is computed exactly: 300,000 digits."""

MOST_TERMS = 10_000
"""Of a sum or product."""

MOST_DEPTH = 60
"""Of brackets: the parser's time grows fast with it."""

_AS_IT_IS = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=True,
    boxed="none",
    equations=False,
)


class _TooLargeError(Exception):
    pass


def equal(given: str, reference: str) -> bool | None:
    """Whether two expressions are equal; None if the reference cannot be read or is too large."""
    given = _with_names_of(given, reference)
    if plain.numeral(reference) and "_" in reference:
        return False  # a numeral of a base, and the answer is none
    has_cases = _has_cases(given) or _has_cases(reference)
    theirs = _read(reference, has_cases)
    if theirs is None:
        return None
    try:
        _check_size(theirs)
    except _TooLargeError:
        return None
    ours = _read(given, has_cases)
    if ours is None:
        return False
    try:
        _check_size(ours)
    except _TooLargeError:
        return False
    if _unfinished(ours) and not _unfinished(theirs):
        return False
    return _equal_values(ours, theirs)


def is_readable(text: str) -> bool:
    """Whether an expression can be read, and worked with."""
    value = _read(text, _has_cases(text))
    try:
        _check_size(value)
    except _TooLargeError:
        return False
    return value is not None


_TWO_READINGS = (
    # A letter behind a number and a space is a unit or a factor; math-verify's bars are long.
    (re.compile(r"(.*[\d}])\s+([mgshlLNJWVAKCF])"), r"\1", r"\1 \\cdot \2"),
    (re.compile(r"(.*?)(\d+)/(\d+)\s*([a-zA-Z].*)"), r"\1\\frac{\2}{\3}\4", r"\1\\frac{\2}{\3\4}"),
    (re.compile(r"(\w+)\^(\w+)\^(\w+)"), r"\1^{\2^{\3}}", r"(\1^{\2})^{\3}"),
)


def readings(reference: str) -> tuple[str, str] | None:
    """Two ways to read a cleaned reference, where there are two."""
    for pattern, one, other in _TWO_READINGS:
        if match := pattern.fullmatch(reference):
            return match.expand(one), match.expand(other)
    return None


def _has_cases(text: str) -> bool:
    """Whether a letter occurs in both cases: R - r."""
    letters = set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)))
    return any(letter.upper() in letters for letter in letters if letter.islower())


_DEFINITION = re.compile(r"\s*([A-Za-z])\s*\(\s*([A-Za-z])\s*\)\s*=\s*(.+)", re.DOTALL)
_NAMED = re.compile(r"\s*([A-Za-z])\s*=\s*(.+)", re.DOTALL)


def _with_names_of(given: str, reference: str) -> str:
    """A function's definition with the reference's name for the argument, f(t) as f(x)."""
    ours = _DEFINITION.fullmatch(given)
    if ours is None:
        if (theirs := _DEFINITION.fullmatch(reference)) and (named := _NAMED.fullmatch(given)):
            return f"{theirs[1]}({theirs[2]})={named[2]}" if named[1] == "y" else given
        return given
    name, argument, value = ours.groups()
    if theirs := _DEFINITION.fullmatch(reference):
        renamed = _renamed(value, argument, theirs[2])
        return given if renamed is None else f"{name}({theirs[2]})={renamed}"
    if named := _NAMED.fullmatch(reference):
        letters = _letters(named[2])
        if named[1] == "y" and len(letters) == 1:
            renamed = _renamed(value, argument, letters.pop())
            return given if renamed is None else f"y={renamed}"
    return given


def _letters(text: str) -> set[str]:
    return set(
        re.findall(r"(?<!\\)\b[a-zA-Z]\b|(?<=\d)[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", " ", text))
    ) - {"e", "i"}


def _renamed(text: str, old: str, new: str) -> str | None:
    """`text` with another name for `old`; None if that name is another's already."""
    if old == new:
        return text
    if new in re.sub(r"\\[a-zA-Z]+", "", text):
        return None
    return re.sub(rf"\\[a-zA-Z]+|{old}", lambda m: new if m[0] == old else m[0], text)


_PLAIN_FUNCTION = re.compile(rf"(?<![\\a-zA-Z])({FUNCTIONS}|pi)(?![a-zA-Z])")
_PLAIN_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)")
_REFUSED = re.compile(
    r"\\ldots|[\d)}]\s*_(?!\{?\\text)|(?<![\^_\d])\d+\s+\d|\d\.\d*\.\d|[?#@]|\\text(?!\s*\{)|\d'"
    r"|\\not(?![a-zA-Z])"
)
_OR = re.compile(
    r"\\text\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\cup(?![a-zA-Z])", re.IGNORECASE
)
_AND_OR = re.compile(
    r"\s*,?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))"
)
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\||:)\s*(.+)\\\}", re.DOTALL
)


@functools.lru_cache(maxsize=4096)
def _read(text: str, has_cases: bool) -> Any:
    """The sympy object of all of `text`; None if there is none."""
    if (builder := _BUILDER.fullmatch(text)) and _RELATION.search(builder[2]):
        text = builder[2]
    parts = _OR.split(text)
    if len(parts) > 1 and all(map(_RELATION.search, parts)):
        sets = [_as_set(_read(part.strip(" ,;"), has_cases)) for part in parts]
        return None if None in sets else sympy.Union(*sets)
    return _parse(_AND_OR.sub(", ", text), has_cases)


def _as_set(value: Any) -> Any:
    if isinstance(value, sympy.Set):
        return value
    if isinstance(value, sympy.Eq) and isinstance(value.rhs, sympy.Set):
        return value.rhs
    if isinstance(value, And):
        value = sympy.And(*value._unsorted_args)
    try:
        return value.as_set()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _prepare(text: str) -> str | None:
    """What math-verify reads as it should; None if there is something it would leave out."""
    text = _join_thousands(text).removesuffix("%")  # 50% is 50
    text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", text)
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text)
    text = re.sub(r"_\s*\{\s*\\(max|min)\s*\}", r"_{\1}", text)
    text = re.sub(r"([A-Za-z])('+)", lambda m: f"{m[1]}_{{{'p' * len(m[2])}}}", text)
    text = re.sub(
        r"_\s*\{\s*\\text\s*\{\s*(\w+)\s*\}\s*\}|_\s*\\text\s*\{\s*(\w+)\s*\}", r"_{\1\2}", text
    )
    if _REFUSED.search(text):
        return None
    text = re.sub(r"(?<![a-zA-Z\\])([eE])(?=\s*_)", r"\\text{\1}", text)  # no number with an index
    text = _without_differentials(text)
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        return None
    return _without_idle_braces(text)


_CALCULUS = re.compile(
    r"\\i*(?:int|oint)(?![a-zA-Z])|\\d?frac\s*\{\s*d[^{}]*\}\s*\{\s*d\s*(?:[a-zA-Z]|\\[a-zA-Z])"
)
_DIFFERENTIAL = re.compile(
    r"(?P<no_factor>_\s*\{[^{}]*\}|\\(?:begin|end|text|mathrm|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+)"
    r"|d(?=\s*(?P<of>[a-zA-Z]|\\[a-zA-Z]+))"
)
_VARIABLE = re.compile(r"[r-zR-Z]|\\(?:theta|phi)")


def _without_differentials(text: str) -> str:
    r"""With d as the factor that it is: math-verify has 8 times dt for 8dt, dsqrt for d\sqrt2.

    It stays what it is in integrals and derivatives, and where there are dx and dy.
    """
    found = [match["of"] for match in _DIFFERENTIAL.finditer(text)]
    if _CALCULUS.search(text) or len({of for of in found if of and _VARIABLE.fullmatch(of)}) > 1:
        return text
    return _DIFFERENTIAL.sub(lambda match: match["no_factor"] or r"\text{d}", text)


_THOUSANDS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.])\d{1,3}(?: \d{3})+(?!\d)"
)


def _join_thousands(text: str) -> str:
    """Numbers without separators, but between parentheses, where a comma ends an element."""
    parts, depth, end = [], 0, 0
    for token in re.finditer(r"\\[{}]|[()\[\]]|" + _THOUSANDS.pattern, text):
        if token[0] in ("(", "[", "\\{"):
            depth += 1
        elif token[0] in (")", "]", "\\}"):
            depth -= 1
        elif depth == 0 or " " in token[0]:
            parts += [text[end : token.start()], token[0].replace(",", "").replace(" ", "")]
            end = token.end()
    return "".join((*parts, text[end:]))


_IDLE_BRACES = re.compile(r"(?<![\\^_\w}\]])\{([^{}]*)\}|(?<=\d)\{([^{}]*)\}")


def _without_idle_braces(text: str) -> str:
    """Braces that are nobody's argument as parentheses: math-verify makes sets of them."""

    def group(match: re.Match[str]) -> str:
        inside = match[1] if match[1] is not None else match[2]
        before = text[: match.start()].rstrip()
        if before.endswith(("^", "_", "}", "]")) or re.search(r"\\[a-zA-Z]+$", before):
            return match[0]
        if not inside.strip():
            return " "
        if re.search(r"[-+,]", inside):
            return f"\\{{{inside}\\}}" if "," in inside else f"({inside})"
        return f" {inside} "

    return _IDLE_BRACES.sub(group, text)


_IMAGINARY = sympy.Symbol("i", real=True)


def _parse(text: str, has_cases: bool) -> Any:
    plain_number = plain.number(text)
    if plain_number and not (plain_number.unit or plain_number.is_percent or plain_number.bound):
        value = plain_number.value * plain_number.magnitude  # at once: the parser takes its time
        exact = sympy.Rational(value.numerator, value.denominator)
        return exact.evalf() if plain_number.is_decimal else exact
    prepared = _prepare(text)
    if prepared is None:
        return None
    try:
        value = _latex(prepared, has_cases)
    except Exception:  # of a syntax error latex2sympy raises just that, of a bad value anything
        parts = re.split(r"(?<![\\<>!])=", prepared)
        if len(parts) < 3 or "," in prepared or ";" in prepared:
            return None
        try:
            value = _latex(parts[-1], has_cases)  # a chain of equations: the last is meant
        except Exception:
            return None
    if value is None or value in (sympy.nan, sympy.zoo):
        return None
    if isinstance(value, sympy.Basic | sympy.MatrixBase) and value.has(_IMAGINARY):
        with contextlib.suppress(ValueError, TypeError):  # an interval up to i
            if isinstance(value, sympy.Eq):
                sides = [side.subs(_IMAGINARY, sympy.I) for side in (value.lhs, value.rhs)]
                value = sympy.Eq(*sides, evaluate=False)
            else:
                value = value.subs(_IMAGINARY, sympy.I)
    if isinstance(value, sympy.Basic) and value.has(sympy.Derivative):
        value = value.replace(_is_of_letter, lambda one: sympy.Symbol(str(one), real=True))
    return value


def _is_of_letter(value: Any) -> bool:
    """Whether it is dy/dx: to sympy y depends on nothing, and that is zero."""
    return isinstance(value, sympy.Derivative) and value.expr.is_Symbol


def _latex(text: str, has_cases: bool) -> Any:
    return latex2sympy(
        normalize_latex(text, _AS_IT_IS),
        is_real=True,  # one and the same for both, or no letter is equal to itself
        convert_degrees=False,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=not has_cases),
    )


def _unfinished(value: Any) -> bool:
    """Whether it has what would have to be worked out first, which may take for ever."""
    return bool(getattr(value, "has", None)) and value.has(sympy.Integral, sympy.Limit)


def _check_size(value: Any) -> None:
    """Refuse what takes too long or too much memory to compute, before anything is."""
    if isinstance(value, sympy.MatrixBase):
        for entry in value:
            _bits(entry)
    elif isinstance(value, sympy.Basic):
        _bits(value)


def _bits(value: Any) -> float:
    """About how many bits its value has, from above; of what has letters, its exponents'."""
    if isinstance(value, sympy.Rational):
        return float(max(abs(value.p).bit_length(), value.q.bit_length()))
    if isinstance(value, sympy.Float):
        return abs(float(sympy.log(abs(value), 2).evalf(5))) + 53 if value else 1.0
    sizes = [_bits(one) for one in getattr(value, "args", ()) if isinstance(one, sympy.Basic)]
    bits = max(sizes, default=2.0)
    if isinstance(value, sympy.Pow | sympy.exp):
        base, exponent = value.as_base_exp()
        if not exponent.free_symbols:
            times = _size(exponent, _bits(exponent))
            bits = 1.0 if base.is_Symbol else max(1.0, _bits(base)) * times
    elif isinstance(value, sympy.Mul | sympy.Add):
        bits = sum(sizes) if isinstance(value, sympy.Mul) else bits + math.log2(len(sizes) + 1)
    elif isinstance(value, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.subfactorial):
        times = _size(value.args[0], sizes[0])
        bits = 1.0 if value.args[0].free_symbols else times * max(1.0, sizes[0])
    elif isinstance(value, sympy.binomial):
        if not value.free_symbols:
            bits = min(_size(one, size) for one, size in zip(value.args, sizes, strict=True))
            bits = max(bits, 1.0) * max(sizes)
    elif isinstance(value, sympy.Sum | sympy.Product):
        for _, low, high in value.limits:
            if (high - low).is_infinite or _size(high - low, _bits(high - low)) > MOST_TERMS:
                raise _TooLargeError
    if bits > MOST_BITS:
        raise _TooLargeError
    return bits


def _size(value: Any, bits: float) -> float:
    """An upper bound of what a number of so many bits counts."""
    if value.is_Rational or value.is_Float:
        return float(min(abs(value), 2**64))
    return 2.0 ** min(bits, 64)


def _equal_values(ours: Any, theirs: Any) -> bool | None:
    if type(ours) is type(theirs) and ours == theirs:
        return True
    if (parts := _parts(ours, theirs)) is not None:
        return all(_equal_values(*pair) for pair in parts)
    close = _close_numbers(ours, theirs)
    if close is False or (close and _has_decimals(ours, theirs)):
        return close
    if (
        close is not False
        and _are_numbers(ours, theirs)
        and (same := _same_number(ours, theirs)) is not None
    ):
        return same
    if _is_expression(ours) and _is_expression(theirs):
        same = _same_at_random(ours, theirs)
        if same is not None:
            return same
    if isinstance(ours, sympy.Eq) and isinstance(theirs, sympy.Eq):
        if ours.lhs == theirs.lhs and all(_is_solved(one) for one in (ours, theirs)):
            return _equal_values(ours.rhs, theirs.rhs)
        same = _same_equation(ours, theirs)
        if same is not None:
            return same
    return bool(
        math_verify.verify(
            [theirs],
            [ours],
            timeout_seconds=None,  # the pool's is the limit: an alarm cannot end one instruction
            raise_on_error=True,
            allow_set_relation_comp=True,
        )
    )


def _are_numbers(*values: Any) -> bool:
    return all(getattr(value, "is_number", False) for value in values)


def _close_numbers(given: Any, reference: Any) -> bool | None:
    """As `_close`; None unless both are numbers. To math-verify, what is small enough is zero."""
    if not _are_numbers(given, reference):
        return None
    given, reference = given.doit(), reference.doit()
    error, size = abs((given - reference).evalf()), abs(reference.evalf())
    if error.is_Float and error._prec == 1:  # nothing is left of its digits
        return None
    if not (error.is_finite and size.is_finite and error.is_real and size.is_real):
        return None
    return bool(error <= min(1, size) * 1.000001e-6)  # evalf rounds


def _same_number(given: Any, reference: Any) -> bool | None:
    """To 25 digits and more, which no two expressions share by chance; None if it cannot be had."""
    given, reference = given.doit(), reference.doit()
    if given.is_Rational and reference.is_Rational:
        return bool(given == reference)
    error, size = abs((given - reference).evalf(30, maxn=1000)), abs(reference.evalf())
    if not (error.is_real and size.is_real and 0 < size < 10**60):
        return None
    return bool(error < min(1, size) * sympy.Float("1e-25"))


def _parts(ours: Any, theirs: Any) -> list[tuple[Any, Any]] | None:
    """Pairs that must be equal, of what has parts in an order: tuples, intervals, matrices."""
    if isinstance(ours, sympy.Tuple) and isinstance(theirs, sympy.Tuple):
        return list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else None
    if isinstance(ours, sympy.MatrixBase) and isinstance(theirs, sympy.MatrixBase):
        return list(zip(ours, theirs, strict=True)) if ours.shape == theirs.shape else None
    if (
        isinstance(ours, sympy.Interval)
        and isinstance(theirs, sympy.Interval)
        and (ours.left_open, ours.right_open) == (theirs.left_open, theirs.right_open)
    ):
        return [(ours.start, theirs.start), (ours.end, theirs.end)]
    return None


def _has_decimals(*values: Any) -> bool:
    return any(atom.is_Float for value in values for atom in value.atoms())


def _is_expression(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and not value.is_Matrix


_STEPS = (
    sympy.floor, sympy.ceiling, sympy.Mod, sympy.sign, sympy.Sum, sympy.Product, sympy.Derivative,
    sympy.Integral, sympy.Limit, sympy.core.function.AppliedUndef, sympy.UnevaluatedExpr,
)  # fmt: skip


def _same_at_random(ours: Any, theirs: Any) -> bool | None:
    """By values at some points: False if they differ; None if that does not tell."""
    letters = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    if not letters:
        return None
    if ours.has(*_STEPS) or theirs.has(*_STEPS) or _has_decimals(ours, theirs):
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
    """Whether a root or logarithm of something negative is in it, whose sign is a convention."""
    inside = [one.base for one in value.atoms(sympy.Pow) if not one.exp.is_integer]
    inside += [one.args[0] for one in value.atoms(sympy.log)]
    return any(not one.subs(point).evalf().is_nonnegative for one in inside)


def _is_solved(equation: Any) -> bool:
    """Whether it says what a letter, or a function, is."""
    left = equation.lhs
    is_name = left.is_Symbol or isinstance(left, sympy.core.function.AppliedUndef)
    return is_name and not (left.is_Symbol and equation.rhs.has(left))


def _same_equation(ours: Any, theirs: Any) -> bool | None:
    """True where one is a multiple of the other; False where solving cannot tell them apart."""
    if not all(_is_expression(side) for one in (ours, theirs) for side in (one.lhs, one.rhs)):
        return None
    one, other = ours.lhs - ours.rhs, theirs.lhs - theirs.rhs
    if one.free_symbols != other.free_symbols:
        return None
    if _same_at_random(one, other) or _same_at_random(one, -other):
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
        if _same_at_random(one, factor * other):
            return True
    # Both without a solution are the same to math-verify.
    return None if len(one.free_symbols) > 1 or sympy.solve(theirs) else False


__all__ = ["equal", "is_readable", "readings"]
