"""Respellings of answers by rules of notation, and answers that one sign or word makes wrong.

The rules are those of notation and not of the verifier: Unicode signs, words, the order of
products, digits and separators of other places. Seeded. Every pair is a reference and an answer.
"""

# ruff: noqa: RUF001 (signs that look like others are the subject)
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction

from tests.math_respellings import Pair

Rule = Callable[[random.Random], tuple[str, list[str], list[str]]]
"""A reference, its respellings, and what is not equal to it."""


def ruled_pairs(count: int, *, seed: int) -> Iterator[Pair]:
    """So many pairs: of every rule in turn, one equal and one different."""
    rng = random.Random(seed)
    number = 0
    while number < count:
        for rule in RULES:
            reference, equal, different = rule(rng)
            for is_equal, options in ((True, equal), (False, different)):
                yield Pair(reference, rng.choice(options), is_equal, rule.__name__.strip("_"))
                number += 1


_RAISED = str.maketrans("0123456789-+n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ")
_LOWERED = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_ZEROS = "\uff10\u0660\u0966\u09e6\u06f0\U0001d7ce\U0001d7e2"  # of digits in other scripts
_VULGAR = {
    (1, 2): "½", (1, 3): "⅓", (2, 3): "⅔", (1, 4): "¼", (3, 4): "¾", (1, 5): "⅕", (2, 5): "⅖",
    (3, 5): "⅗", (4, 5): "⅘", (1, 6): "⅙", (5, 6): "⅚", (1, 8): "⅛", (3, 8): "⅜", (5, 8): "⅝",
    (7, 8): "⅞",
}  # fmt: skip
_WORDS = (
    "halves thirds quarters fifths eighths twelfths hundredths hundreds thousands millions"
    " thousand million billion trillion lakh crore dozen dozens doubled tripled squared cubed"
    " factorial negative percentiles minus infinity tens score gross"
)
_PHRASES = (
    "below zero,is wrong,is not it,or more,or less,at most,and a half,point five,times ten"
    ",over two,more than that,to the fourth,mod 7"
)
_UNITS = (
    "cm,meters,hours,dollars,students,apples,ways,kg,points,square units,miles per hour,marbles"
    ",days,cm²"
)
_BEFORE = (
    "Wrong,Minus,Half,Negative,Not equal to,Twice the answer,All except,Not,Half of it,At least"
    ",Over,Less than,More than,One less than,Double,The opposite of,A third of,No,Incorrect"
)
_CHANGING_WORDS = [*_WORDS.split(), *_PHRASES.split(",")]


def _other_digits(rng: random.Random, text: str) -> str:
    zero = ord(rng.choice(_ZEROS))
    return "".join(chr(zero + int(sign)) if sign.isdigit() else sign for sign in text)


def _invented(rng: random.Random) -> str:
    """A word of no language: whether it is a unit nobody can know."""
    return "".join(rng.choice("bdfgklmnprtvz") + rng.choice("aeiou") for _ in range(4)) + "x"


def _whole(rng: random.Random) -> int:
    return rng.choice([-1, 1, 1]) * rng.randint(2, rng.choice([99, 9_999]))


def _digits(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n = _whole(rng)
    minus = str(n).replace("-", "−")
    equal = [_other_digits(rng, str(n)), minus, _other_digits(rng, minus), f"{n}\u200b"]
    extra = _other_digits(rng, str(rng.randrange(10)))
    different = [
        f"{n}{extra}",
        f"{extra}{abs(n)}" if extra != _other_digits(rng, "0") else "x",
        _other_digits(rng, str(n + 1)),
        _other_digits(rng, str(-n)),
    ]
    return str(n), equal, [one for one in different if one.lstrip(_ZEROS) != str(n)]


def _separators(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n = rng.randint(10_000, 99_999_999)
    separator = rng.choice([",", "\u202f", "\u2009", "\u00a0", "{,}", "\\,", "\uff0c"])
    grouped = f"{n:,}".replace(",", separator)
    miss = f"{n + 10 ** rng.randint(0, 4):,}".replace(",", separator)
    return str(n), [grouped, _other_digits(rng, f"{n:,}")], [miss, f"-{grouped}", f"{grouped}⁰²"]


def _raised(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, n = rng.randint(2, 30), rng.choice([-1, 1, 1]) * rng.randint(2, 15)
    raised = f"{a}{str(n).translate(_RAISED)}"
    different = [
        f"{a}{str(n + 1).translate(_RAISED)}",
        f"{a}{str(-n).translate(_RAISED)}",
        f"{a}{n}",
        f"{a + 1}{str(n).translate(_RAISED)}",
        str(a),
        f"{raised}¹²",
    ]
    return f"{a}^{{{n}}}", [raised, f"({a}){str(n).translate(_RAISED)}"], different


def _polynomial(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b, n = rng.randint(2, 9), rng.randint(2, 20), rng.randint(3, 12)
    x = rng.choice("xyzt")
    power = str(n).translate(_RAISED)
    equal = [
        f"{a}{x}{power} − {b}",
        f"−{b} + {a}{x}{power}",
        f"{a}·{x}{power}−{b}",
        f"{a}×{x}{power}−{b}",
    ]
    equal.append(f"{a}{chr(0x1D44E + ord(x) - ord('a'))}{power}−{b}")
    other = str(n + 1).translate(_RAISED)
    different = [f"{a}{x}{other}−{b}", f"{a}{x}{power}+{b}", f"{a}{x}−{b}", f"{a}{x}{n}−{b}"]
    return f"{a}{x}^{{{n}}}-{b}", equal, different


def _root(rng: random.Random) -> tuple[str, list[str], list[str]]:
    c, a, b = rng.choice([10, 13, 15, 21, 26, 33, 105]), rng.randint(2, 9), rng.randint(1, 9)
    reference = f"{a}\\sqrt{{{c}}}+{b}"
    equal = [
        f"{a}√{c}+{b}",
        f"{b} + {a}√({c})",
        f"{a}·√{c}+{b}",
        f"√{a * a * c}+{b}",
        f"{a}√ {c}+{b}",
    ]
    head, tail = str(c)[:-1], str(c)[-1]
    different = [
        f"{a}\\sqrt{{{head}}}{tail}+{b}",
        f"{a}√({c}+{b})",
        f"{a}√{c}−{b}",
        f"√{a}{c}+{b}",
        f"{a}∛{c}+{b}",
        f"{a}√{c + 1}+{b}",
    ]
    return reference, equal, different


def _nested_root(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.randint(5, 20), rng.choice([2, 3, 5, 6, 7])
    equal = [f"√({a}+√{b})", f"√({a} + √({b}))", f"√{{{a}+√{b}}}"]
    different = [f"√({a}−√{b})", f"√{a}+√{b}", f"√({a}+{b})", f"√({a}+√{b}1)", f"√({a}+√{b}){b}"]
    return f"\\sqrt{{{a}+\\sqrt{{{b}}}}}", equal, different


def _vulgar(rng: random.Random) -> tuple[str, list[str], list[str]]:
    (top, bottom), sign = rng.choice(list(_VULGAR.items()))
    whole = rng.randint(0, 30)
    value = whole + Fraction(top, bottom)
    equal = [f"{whole or ''}{sign}", f"{whole or ''} {top}⁄{bottom}".strip()]
    different = [
        f"{whole + 1}{sign}",
        f"{sign}{whole + 2}",
        f"−{whole or ''}{sign}",
        f"{whole or 2}{sign}{sign}",
        f"{value.numerator + 1}/{value.denominator}",
    ]
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}", equal, different


def _behind(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n = rng.randint(2, 9_999)
    unit = rng.choice(_UNITS.split(","))
    equal = [f"{n}\\text{{ {unit}}}", f"\\text{{{n} {unit}}}"]
    sign = rng.choice("⁶⁴₃¾½万亿千①‰éªжξ一")
    word = rng.choice([*_CHANGING_WORDS, _invented(rng)])
    different = [
        f"{n}{sign}",
        f"{n} {sign}",
        f"{n}\\text{{{sign}}}",
        f"{n}\\text{{ {word}}}",
        f"{n} {word}",
        f"{n}\\text{{ {word} {unit}}}",
        f"{n}分之一",
        f"{n}_{{{43 + n}}}",
        f"{n + 1}={n}",
    ]
    return str(n), equal, different


def _behind_symbols(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n = rng.randint(2, 40)
    word = rng.choice([*_CHANGING_WORDS, _invented(rng)])
    equal = [f"{n}π", f"{n}\\pi\\text{{ cm}}", f"π·{n}", f"{n}\\pi\\text{{ square units}}"]
    different = [
        f"{n}π²",
        f"{n}\\pi\\text{{ {word}}}",
        f"{n}π⁴",
        f"{n}\\pi\\text{{万}}",
        f"\\pi^{n}",
        f"{n}π½",
    ]
    return f"{n}\\pi", equal, different


def _product(rng: random.Random) -> tuple[str, list[str], list[str]]:
    f, g = rng.sample(["\\sin", "\\cos", "\\tan", "\\ln", "\\arctan"], 2)
    a, x, y = rng.randint(2, 9), *rng.sample("xyzt", 2)
    equal = [
        f"{a}{f} {x} \\cdot {g} {y}",
        f"{g} {y} \\cdot {a}{f} {x}",
        f"{a}{g}({y}){f}({x})",
        f"{f} {x} \\cdot {g} {y} \\cdot {a}",
        f"{a}·{f} {x}·{g} {y}",
        f"{g} {y}{f} {x} \\times {a}",
    ]
    different = [
        f"{a}{f}({x}{g} {y})",
        f"{a}{f} {y}{g} {x}",
        f"{a}{f} {x}+{g} {y}",
        f"{f} {{{a}{x}}}{g} {y}",
    ]
    return f"{a}{f} {x}{g} {y}", equal, different


def _logarithm(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.sample([2, 3, 5, 6, 7, 10], 2)
    equal = [
        f"\\ln {a} \\cdot {b}",
        f"\\ln({a})·{b}",
        f"\\ln {a}×{b}",
        f"{b} \\log_e {a}",
        f"\\ln {a**b}",
    ]
    different = [
        f"\\ln {a * b}",
        f"\\ln ({a}\\cdot {b})",
        f"{a}\\ln {b}",
        f"\\ln {a}^{{{b + 1}}}",
        f"{b}\\ln {a}²",
    ]
    if a * b == a**b or b**a == a**b:
        return _logarithm(rng)
    return f"{b}\\ln {a}", equal, different


def _over(rng: random.Random) -> tuple[str, list[str], list[str]]:
    x, n = rng.choice("xyzt"), rng.randint(2, 9)
    equal = [f"{x} \\ln {x}", f"\\ln {x} \\cdot {x}", f"(\\ln {x}){x}", f"{x}·\\ln({x})"]
    different = [f"\\ln({x}²)", f"\\ln {x}^2", f"\\ln {x}", f"{x}\\ln {n}{x}", f"\\ln {x} + {x}"]
    return f"{x}\\ln {x}", equal, different


def _index(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n, m = rng.sample(range(1, 30), 2)
    equal = [f"a{str(n).translate(_LOWERED)}+1", f"1+a_{{{n}}}"]
    different = [f"a{str(m).translate(_LOWERED)}+1", f"a{str(n).translate(_RAISED)}+1", f"a·{n}+1"]
    return f"a_{{{n}}}+1", equal, different


def _pair(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.sample(range(2, 60), 2)
    equal = [
        f"（{a}，√{b}）",
        f"⟨{a}, √{b}⟩",
        f"\\begin{{pmatrix}}{a}\\\\√{b}\\end{{pmatrix}}",
        f"({a},√{b})",
    ]
    different = [
        f"（√{b}，{a}）",
        f"({a}, −√{b})",
        f"({a}²,√{b})",
        f"({a},√{b}{a})",
        f"\\{{{a},√{b}\\}}",
    ]
    return f"({a},\\sqrt{{{b}}})", equal, different


def _before(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n, x = rng.randint(2, 9_999), rng.choice("xyzt")
    word = rng.choice([*_BEFORE.split(","), _invented(rng).capitalize()])
    equal = [
        f"\\text{{The answer is }}{n}", f"\\text{{Answer: }}{n}", f"\\text{{Area}} = {n}",
        f"{x} = {n}", f"{x}_1 = {n}", f"f({x}) = {n}", f"\\text{{The total is: }}{n}", f"AB = {n}",
        f"= {n}",
    ]  # fmt: skip
    different = [
        f"\\text{{{word}: }}{n}", f"{word}: {n}", f"\\text{{{word} }}{n}",
        f"\\text{{{word}}} = {n}", f"{x} \\text{{ is {word.lower()}}} = {n}", f"{x} \\not= {n}",
        f"{x} \\ne {n}", f"{n + 1} = {n}", f"\\log_2 8 = {n + (n == 3)}", f"\\sin 0 = {n}",
        f"{n} \\approx {n + 5}", f"\\frac{{{3 * n - 1}}}{{3}} \\approx {n}", f"{n} = {n} + 1",
        f"\\lfloor {n + 1}.5 \\rfloor = {n}", f"\\infty = {n}", f"{x} > {n}", f"- {n}",
    ]  # fmt: skip
    return str(n), equal, different


def _constant(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n = rng.randint(2, 99)
    equal = [f"{n}pi", f"{n} pi", f"{n}*pi", f"pi*{n}", f"{n}π", f"\\pi \\cdot {n}"]
    different = [f"{n}", f"{n}e", f"{n}i", f"{n}\\pi^2", f"{n}log", f"\\pi^{{{n}}}", f"{n}\\pi^T"]
    return f"{n}\\pi", equal, different


def _bare_constant(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n = rng.randint(2, 999)
    different = [f"{n}{one}" for one in ("pi", " pi", "\\text{pi}", "log", " e", "i", "^T", "^n")]
    return str(n), [f"{n}.0", f"{n}^1", f"+{n}"], different


def _primes(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b, x = rng.randint(2, 9), rng.randint(2, 20), rng.choice("xyzt")
    equal = [f"{b}+{a}{x}", f"{a}·{x}+{b}", f"({a}{x}+{b})"]
    different = [
        f"({a}{x}+{b})'",
        f"{a}{x}'+{b}",
        f"{a}{x}+{b}'",
        f"({a}{x}+{b})''",
        f"{a}{x}''+{b}",
    ]
    return f"{a}{x}+{b}", equal, different


def _exponent(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n, letter = rng.randint(2, 9), rng.choice("Ttnk")
    equal = [f"(1+r)^{letter} \\cdot {n}", f"{n}\\cdot(1+r)^{{{letter}}}", f"{n}(r+1)^{letter}"]
    different = [
        f"{n}(1+r)",
        f"{n}(1+r)^m",
        f"{n}^{letter}(1+r)",
        f"{n}(1+r)_{letter}",
        f"{n}(1+r)'",
    ]
    return f"{n}(1+r)^{{{letter}}}", equal, different


def _exponential(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, x, f = rng.randint(2, 9), rng.choice("xt"), rng.choice(["\\sin", "\\cos", "\\ln"])
    power = f"e^{{{a}{x}}}"
    equal = [f"{f} {x} {power}", f"{f}({x}){power}", f"{f} {x}\\,{power}", f"{power}\\cdot{f} {x}"]
    different = [f"{f}({x}{power})", f"e^{{{a}}}{f} {x}", f"{power}{f} {a}{x}", f"{power}+{f} {x}"]
    return f"{power}{f} {x}", equal, different


def _named(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b = rng.sample(range(2, 99), 2)
    equal = [f"x={a},y={b}", f"y={b}, x={a}", f"x={a}\\text{{ and }}y={b}", f"{a}, {b}"]
    equal += [f"({a},{b})", f"(x,y)=({a},{b})", f"⟨{a}, {b}⟩"]
    different = [
        f"({b},{a})", f"(x,y)=({b},{a})", f"⟨{b}, {a}⟩", f"{b}, {a}",
        f"{b},{a},{a}", f"{a},{b},{b}", f"{b},{a},{b}", f"x={b},y={a}",
        f"x={a}, y={a}",
        f"x={a},y\\not={b}", f"{a}, {b}, {a + b}", f"x={a}", f"\\{{{a}\\}}",
    ]  # fmt: skip
    return f"x={a}, y={b}", equal, different


def _choices(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b, c = rng.sample("ABCD", 3)
    equal = [f"{a}, {b}", f"({b}) and ({a})", f"\\text{{{a} and {b}}}", f"({a}), ({b})"]
    different = [a, f"({b})", f"{a}, {c}", f"{a}, {b}, {c}", f"\\text{{({a}) and ({c})}}"]
    return f"\\text{{({a}) and ({b})}}", equal, different


def _angle(rng: random.Random) -> tuple[str, list[str], list[str]]:
    n = rng.randint(2, 179)
    equal = [f"{n}°", f"{n}\\text{{ degrees}}", f"{n}^{{\\circ}}", f"{n}\\degree"]
    different = [
        f"{n}'",
        f"{n}''",
        f"{n}\\text{{ rad}}",
        f"{n}\\%",
        f"{n}\\text{{ cm}}",
        f"{n}°{n}'",
    ]
    return f"{n}^\\circ", equal, different


RULES: list[Rule] = [
    *(_digits, _separators, _raised, _polynomial, _root, _nested_root, _vulgar, _behind),
    *(_behind_symbols, _product, _logarithm, _over, _index, _pair, _behind, _before, _before),
    *(_constant, _bare_constant, _primes, _exponent, _exponential, _named, _choices, _angle),
]
