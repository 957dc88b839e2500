"""Pairs of equal answers and of near misses, out of references like those of DeepScaleR. Seeded."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple


class Case(NamedTuple):
    """A reference, the same in other words, and what is not the same by one change."""

    reference: str
    equal: list[str]
    different: list[str]


class Pair(NamedTuple):
    reference: str
    given: str
    is_equal: bool
    kind: str


def pairs(count: int, *, seed: int) -> Iterator[Pair]:
    """So many pairs: of every kind in turn, half of them equal."""
    rng = random.Random(seed)
    number = 0
    while number < count:
        for make in KINDS:
            case = make(rng)
            for is_equal, options in ((True, case.equal), (False, case.different)):
                given = _respell(rng, rng.choice(options), case.reference)
                yield Pair(case.reference, given, is_equal, make.__name__.strip("_"))
                number += 1


def _respell(rng: random.Random, text: str, reference: str) -> str:
    """The same answer with other spacing, commands, brackets or words around it."""
    not_value = re.compile(r"[=<>]|[A-E][.)]|\\le|\\ge|\\in\b|[a-z]{3} |text|:|\d [a-z]{2}")
    is_value = not (not_value.search(text) or "=" in reference)
    for _ in range(rng.randint(0, 2)):
        change = rng.choice(_CHANGES)
        text = change(rng, text)
    if is_value and rng.random() < 0.25:
        text = rng.choice(
            [
                f"x = {text}",
                f"\\text{{The answer is }} {text}",
                f"\\text{{Area}} = {text}",
                f"\\textbf{{(C)}}\\ {text}",
                f"\\text{{(b) }}{text}",
                f"\\({text}\\)",
            ]
        )
    return text


def _spaces(rng: random.Random, text: str) -> str:
    space = rng.choice([" ", "\\,", "\\ ", "~", "\\;", "  "])
    return re.sub(r"(?<=[-+=,<>])(?=[^\s}\\])(?!\d{3}(?:\D|$))", lambda _: space, text)


def _larger(rng: random.Random, text: str) -> str:
    return text.replace("\\frac", rng.choice(["\\dfrac", "\\tfrac", "\\cfrac"]))


def _sized(rng: random.Random, text: str) -> str:
    if "\\left" in text or "\\{" in text or text.count("(") != text.count(")"):
        return text
    left, right = rng.choice([("\\left", "\\right"), ("\\bigl", "\\bigr"), ("\\big", "\\big")])
    return text.replace("(", f"{left}(").replace(")", f"{right})")


def _ended(rng: random.Random, text: str) -> str:
    return text + rng.choice([".", " ", "\\,", "\n"])


def _dollars(rng: random.Random, text: str) -> str:
    return rng.choice(["${}$", "\\({}\\)", "{{{}}}", " {} ", "\\displaystyle {}"]).format(text)


def _short(rng: random.Random, text: str) -> str:
    del rng
    return re.sub(r"\\(frac)\{(\d)\}\{(\d)\}(?!\d)", r"\\\1\2\3", text)


def _bare_root(rng: random.Random, text: str) -> str:
    return re.sub(r"\\sqrt\{(\d)\}(?![\d{])", rng.choice([r"\\sqrt\1", r"\\sqrt \1"]), text)


_CHANGES: list[Callable[[random.Random, str], str]] = [
    _spaces, _larger, _sized, _ended, _dollars, _short, _bare_root,
]  # fmt: skip


def _near(rng: random.Random, number: int) -> int:
    """Another number: a digit, the sign, or one more."""
    digits = list(str(abs(number)))
    place = rng.randrange(len(digits))
    digits[place] = str((int(digits[place]) + rng.randint(1, 8)) % 10)
    changed = int("".join(digits))
    return rng.choice([n for n in (changed, -number, number + 1, number - 1) if n != number])


def _grouped(rng: random.Random, number: int) -> str:
    separator = rng.choice([",", "{,}", "\\,", ",\\!"])
    return f"{number:,}".replace(",", separator)


def _integer(rng: random.Random) -> Case:
    n = rng.choice([-1, 1, 1]) * rng.randint(2, 9999)
    return Case(str(n), [str(n), f"{n}.0", f"{2 * n}/2"], [str(_near(rng, n)), f"{n}.5", f"{n}x"])


def _large(rng: random.Random) -> Case:
    n = rng.randint(1000, 99_999_999)
    miss = abs(_near(rng, n)) + n * (_near(rng, n) == -n)
    given = [str(n), _grouped(rng, n), f"n = {_grouped(rng, n)}"]
    return Case(rng.choice([str(n), f"{n:,}"]), given, [str(n + 1), _grouped(rng, miss + 7 * n)])


def _fraction(rng: random.Random) -> Case:
    f = Fraction(rng.randint(1, 60) * rng.choice([-1, 1]), rng.randint(2, 40))
    a, b = f.numerator, f.denominator
    if b == 1:
        return _fraction(rng)
    k, sign, p = rng.randint(2, 5), "-" if a < 0 else "", abs(a)
    equal = [f"{sign}\\frac{{{p}}}{{{b}}}", f"{a}/{b}", f"\\frac{{{a * k}}}{{{b * k}}}"]
    miss = [f"{a + 1}/{b}", f"\\frac{{{a}}}{{{b + 1}}}", f"\\frac{{{-a}}}{{{b}}}"]
    if p != b:
        miss.append(f"{sign}\\frac{{{b}}}{{{p}}}")
    return Case(equal[0], equal, miss)


def _mixed(rng: random.Random) -> Case:
    w, b = rng.randint(1, 20), rng.randint(3, 9)
    a = rng.randint(1, b - 1)
    equal = [f"{w}\\frac{{{a}}}{{{b}}}", f"{w} {a}/{b}", f"\\frac{{{w * b + a}}}{{{b}}}"]
    miss = [f"{w + 1}\\frac{{{a}}}{{{b}}}", f"\\frac{{{w * a}}}{{{b}}}", f"{w * b + a}"]
    return Case(equal[0], equal, [m for m in miss if Fraction(w * a, b) != w + Fraction(a, b)])


def _decimal(rng: random.Random) -> Case:
    n = rng.randint(1, 99_999)
    text, value = f"{n / 1000:.3f}", Fraction(n, 1000)
    equal = [text, f"{text}0", f"{value.numerator}/{value.denominator}"]
    return Case(text, equal, [f"{(n + 1) / 1000:.3f}", f"-{text}", f"{n + 1}/1000"])


def _percent(rng: random.Random) -> Case:
    n = rng.randint(2, 99)
    equal = [f"{n}\\%", f"{n}%", f"{n}\\text{{ percent}}", f"0.{n:02d}", str(n)]
    return Case(f"{n}\\%", equal, [f"{n + 1}\\%", f"0.{(n + 1) % 100:02d}", f"-{n}\\%"])


_LENGTHS = {"cm": "centimeters", "km": "kilometers", "ft": "feet", "mm": "millimeters"}


def _unit(rng: random.Random) -> Case:
    n, (short, long) = rng.randint(2, 400), rng.choice(list(_LENGTHS.items()))
    other = rng.choice([name for name in _LENGTHS if name != short])
    equal = [str(n), f"{n}\\text{{ {short}}}", f"{n} {long}", f"{n}\\ \\mathrm{{{short}}}"]
    miss = [f"{n + 1}\\text{{ {short}}}", f"{n}\\text{{ {other}}}", f"-{n} {long}", f"{n}y"]
    return Case(f"{n}\\text{{ {short}}}", equal, miss)


def _area(rng: random.Random) -> Case:
    n = rng.randint(2, 400)
    equal = [str(n), f"{n}\\text{{ cm}}^2", f"{n}\\text{{ square centimeters}}", f"{n} cm^2"]
    miss = [f"{n}\\text{{ cm}}^3", f"{n}\\text{{ m}}^2", f"{n + 1}\\text{{ cm}}^2"]
    return Case(f"{n}\\text{{ cm}}^2", equal, miss)


def _noun(rng: random.Random) -> Case:
    n, noun = rng.randint(2, 400), rng.choice(["weeks", "apples", "students", "games"])
    return Case(str(n), [f"{n} {noun}", f"{n}\\text{{ {noun}}}"], [f"{n + 1} {noun}", f"{noun}"])


def _money(rng: random.Random) -> Case:
    n = rng.randint(1000, 9999)
    equal = [f"\\${n}", f"\\${n:,}", f"{n}\\text{{ dollars}}", str(n), f"\\${n}.00"]
    miss = [f"\\${n + 1}", f"{n}\\text{{ cents}}", f"\\${n}.50"]
    return Case(f"\\${n}", equal, miss)


def _quantities(rng: random.Random) -> Case:
    a, b = rng.randint(2, 11), rng.randint(2, 11)
    ref = f"{a}\\text{{ feet }}{b}\\text{{ inches}}"
    equal = [ref, f"{a} feet {b} inches", f"{a}\\text{{ ft }}{b}\\text{{ in}}"]
    equal.append(f"{12 * a + b} inches")
    miss = [f"{a}\\text{{ feet }}{b + 1}\\text{{ inches}}", f"{a}\\text{{ feet}}", str(a)]
    return Case(ref, equal, [*miss, f"{a + 1} feet {b} inches", f"{a} yards {b} inches"])


def _counted(rng: random.Random) -> Case:
    a, b = rng.sample(range(2, 40), 2)
    ref = f"{a}\\text{{ boys and }}{b}\\text{{ girls}}"
    equal = [ref, f"{a} boys and {b} girls", f"{b} girls and {a} boys", f"{a} boys, {b} girls"]
    miss = [f"{a} boys and {b + 1} girls", f"{b} boys and {a} girls", f"{a} boys"]
    return Case(ref, equal, [*miss, f"{a}\\text{{ boys and }}{b}\\text{{ cats}}"[:0] or str(a)])


def _radical(rng: random.Random) -> Case:
    a, b, c = rng.randint(1, 20), rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7])
    sign = rng.choice("+-")
    other = "+" if sign == "-" else "-"
    ref = f"{a}{sign}{b}\\sqrt{{{c}}}"
    swapped = f"{'' if sign == '+' else '-'}{b}\\sqrt{{{c}}}+{a}"
    equal = [ref, swapped, f"{a}{sign}\\sqrt{{{b * b * c}}}", f"{a}{sign}{b}\\cdot\\sqrt{{{c}}}"]
    miss = [f"{a}{other}{b}\\sqrt{{{c}}}", f"{a + 1}{sign}{b}\\sqrt{{{c}}}", f"{b}\\sqrt{{{c}}}"]
    return Case(
        ref, equal, [*miss, f"{a}{sign}{b}\\sqrt{{{c + 8}}}", f"{a}{sign}{b}\\sqrt{{{c}}}t"]
    )


def _quotient(rng: random.Random) -> Case:
    a, b, c = rng.randint(2, 9), rng.choice([2, 3, 5, 7]), rng.choice([4, 5, 7, 9])
    ref = f"\\frac{{{a}\\sqrt{{{b}}}}}{{{c}}}"
    equal = [ref, f"{a}\\sqrt{{{b}}}/{c}", f"\\frac{{{a}}}{{{c}}}\\sqrt{{{b}}}"]
    miss = [f"\\frac{{{a}\\sqrt{{{b}}}}}{{{c + 1}}}", f"-{ref}", f"\\frac{{{a}{b}}}{{{c}}}"]
    return Case(ref, equal, miss)


def _root_power(rng: random.Random) -> Case:
    a, n = rng.choice([2, 3, 5, 7]), rng.choice([3, 4, 5])
    equal = [
        f"{a}^{{\\frac{{1}}{{{n}}}}}",
        f"{a}^\\frac1{n}",
        f"\\sqrt[{n}]{{{a}}}",
        f"{a}^{{1/{n}}}",
    ]
    miss = [
        f"\\frac{{1}}{{{n}}}",
        f"{a}^{{\\frac{{1}}{{{n + 1}}}}}",
        f"{a}^{{{n}}}",
        f"\\sqrt{{{a}}}",
    ]
    return Case(rng.choice(equal), equal, miss)


def _pi(rng: random.Random) -> Case:
    a, b = rng.randint(1000, 9999), rng.randint(2, 30)
    ref = rng.choice([f"{a}\\pi", f"{a}\\pi-{b}"])
    rest = ref.partition("\\pi")[2]
    equal = [ref, f"{_grouped(rng, a)}\\pi{rest}", f"{a}\\cdot\\pi{rest}", f"{rest}+{a}\\pi"]
    return Case(ref, equal if rest else equal[:3], [f"{a + 1}\\pi{rest}", f"{a}{rest}", f"-{ref}"])


def _polynomial(rng: random.Random) -> Case:
    a, b, c = rng.randint(2, 9), rng.randint(1, 12), rng.randint(1, 12)
    x = rng.choice("xtnmsk")
    ref = f"{a}{x}^2+{b}{x}-{c}"
    equal = [ref, f"{b}{x}-{c}+{a}{x}^{{2}}", f"{x}({a}{x}+{b})-{c}", f"-{c}+{x}*{b}+{a}{x}^2"]
    miss = [
        f"{a}{x}^2-{b}{x}-{c}",
        f"{a}{x}^2+{b + 1}{x}-{c}",
        f"{a}{x}^2+{b}-{c}",
        f"{a}{x}^3+{b}{x}-{c}",
    ]
    return Case(ref, equal, miss)


def _formula(rng: random.Random) -> Case:
    a, letters = rng.randint(2, 9), rng.choice(["dt", "gt", "hd", "ct", "gh", "hl", "lt"])
    p, q = letters
    ref = rng.choice([f"{a}{p}{q}", f"\\pi {p}^{a} {q}", f"1+{a}{q}"])
    swapped = {3: ref[0] + q + p}.get(len(ref), ref)
    miss = [ref[:-1].rstrip("+"), f"{ref}+1", f"-{ref}", f"{ref}z"]
    return Case(ref, [ref, f"{ref}+0", swapped], [m for m in miss if m not in ("", "1")])


def _exponential(rng: random.Random) -> Case:
    a = rng.randint(2, 9)
    equal = [f"e^{a}", f"\\mathrm{{e}}^{a}", f"e^{{{a}}}", f"\\exp({a})", f"\\text{{e}}^{{{a}}}"]
    return Case(rng.choice(equal), equal, [f"\\mathrm{{e}}^{a + 1}", f"{a}e", f"e^{{-{a}}}", "e"])


def _complex(rng: random.Random) -> Case:
    a, b = rng.randint(1, 20), rng.randint(2, 20)
    equal = [f"{a}+{b}i", f"{b}i+{a}", f"{a}+{b}\\mathrm{{i}}", f"i({b}-{a}i)", f"{a}+i{b}"]
    return Case(f"{a}+{b}i", equal, [f"{a}-{b}i", f"{a}+{b + 1}i", f"i({b}+{a}i)", str(a + b)])


def _trigonometric(rng: random.Random) -> Case:
    value, angles = rng.choice([("\\frac{1}{2}", ("\\sin 30", "\\cos 60")), ("1", ("\\tan 45",))])
    angle = rng.choice(angles)
    degrees = rng.choice(["^\\circ", "^{\\circ}", "°", "\\degree"])
    miss = [angle, f"{angle[:-2]}20{degrees}", f"-{angle}{degrees}"]
    return Case(value, [angle + degrees, f"{angle[:-3]}({angle[-2:]}{degrees})"], miss)


def _angle(rng: random.Random) -> Case:
    n = rng.randint(2, 359)
    equal = [f"{n}^\\circ", f"{n}^{{\\circ}}", f"{n}", f"{n}\\text{{ degrees}}", f"{n}°"]
    return Case(
        f"{n}^\\circ", equal, [f"{n + 1}^\\circ", f"-{n}", f"{n}\\text{{ radians}}"[:0] or f"{n}.5"]
    )


def _elements(rng: random.Random) -> Case:
    values = rng.sample(range(-30, 90), rng.randint(2, 5))
    text, shuffled = [str(v) for v in values], rng.sample(values, len(values))
    ref = rng.choice([",".join(text), ", ".join(text), f"\\{{{', '.join(text)}\\}}"])
    joined = ", ".join(map(str, shuffled))
    last = f"{', '.join(map(str, shuffled[:-1]))} \\text{{ and }} {shuffled[-1]}"
    equal = [joined, f"\\{{{joined}\\}}", last, joined.replace(", ", "; ")]
    miss = [", ".join(text[:-1]), f"{joined}, 95", f"{joined}, \\ldots"]
    changed = [*text[:-1], str(values[-1] + 100)]
    return Case(ref, equal, [*miss, ", ".join(changed), f"\\{{{joined},\\ldots\\}}"])


def _point(rng: random.Random) -> Case:
    a, b = rng.sample(range(-20, 20), 2)
    equal = [f"({a},{b})", f"({a}, {b})", f"({2 * a}/2, {b})"]
    return Case(f"({a},{b})", equal, [f"({b},{a})", f"({a},{b + 21})", f"({a},{b},0)", f"{a}"])


def _interval(rng: random.Random) -> Case:
    a = rng.randint(-20, 10)
    b = a + rng.randint(1, 20)
    ref = f"[{a},{b}]"
    equal = [ref, f"{a}\\le x\\le {b}", f"x\\in[{a},{b}]", f"{b}\\geq x\\geq {a}"]
    miss = [
        f"({a},{b}]",
        f"[{a},{b + 1}]",
        f"{a}<x\\le {b}",
        f"{a}\\le x\\le {b + 1}",
        f"[{a - 1},{b}]",
    ]
    return Case(ref, equal, miss)


def _ray(rng: random.Random) -> Case:
    a = rng.randint(-20, 20)
    equal = [f"(-\\infty,{a})", f"x<{a}", f"{a}>x", f"x\\in(-\\infty, {a})"]
    miss = [f"(-\\infty,{a}]", f"x>{a}", f"x\\le {a}", f"x<{a + 1}", f"({a},\\infty)"]
    return Case(rng.choice(equal[:2]), equal, miss)


def _line(rng: random.Random) -> Case:
    a, b = rng.randint(2, 9), rng.randint(1, 20)
    equal = [f"y={a}x+{b}", f"y={b}+{a}x", f"f(x)={a}x+{b}", f"f(t)={a}t+{b}", f"{a}x+{b}"]
    miss = [f"y={a}x-{b}", f"y={a + 1}x+{b}", f"f(t)={a}t+{b + 1}", f"f(t)={a}x+{b}", f"y={a}+{b}"]
    return Case(f"y={a}x+{b}", equal, miss)


def _function(rng: random.Random) -> Case:
    a, name = rng.randint(2, 9), rng.choice("fgPh")
    ref = f"{name}(x)=x^2-{a}"
    equal = [
        ref,
        f"{name}(t)=t^2-{a}",
        f"{name}(x)=-{a}+x^2",
        f"{name}(n)=n^{{2}}-{a}",
        f"y=x^2-{a}",
    ]
    miss = [
        f"{name}(t)=t^2+{a}",
        f"{name}(t)=x^2-{a}",
        f"{name}(x)=x^3-{a}",
        f"{name}(x)=x^2-{a + 1}",
    ]
    return Case(ref, equal, miss)


def _time(rng: random.Random) -> Case:
    h, m, half = rng.randint(1, 12), rng.randint(10, 59), rng.choice("ap")
    other = "a" if half == "p" else "p"
    equal = [f"{h}:{m}{half}m", f"{h}:{m} {half.upper()}M", f"{h}:{m}\\text{{ {half}.m.}}"]
    miss = [f"{h}:{m} {other}.m.", f"{h % 12 + 1}:{m} {half}.m.", f"{h}:{(m + 1) % 60:02d} {half}m"]
    return Case(f"{h}:{m} {half.upper()}M", equal, miss)


def _numeral(rng: random.Random) -> Case:
    base = rng.randint(3, 9)
    digits = "1" + "".join(str(rng.randrange(base)) for _ in range(4))
    changed = digits[:-1] + str((int(digits[-1]) + 1) % base)
    equal = [f"{digits}_{base}", f"{digits}_{{{base}}}", f"({digits})_{{{base}}}", digits]
    miss = [f"{changed}_{base}", f"{digits}_{{{base + 10}}}", f"{digits}_{base}{base}", changed]
    return Case(equal[0], equal, miss)


def _choice(rng: random.Random) -> Case:
    n, letter = rng.randint(10, 99), rng.choice("ABCDE")
    equal = [f"\\textbf{{({letter})}}\\ {n}", f"\\text{{({letter}) }}{n}", f"({letter}) {n}"]
    equal += [f"\\text{{{letter}. }}{n}", f"{letter}. {n}", f"\\mathrm{{({letter})}}~{n}"]
    miss = [f"\\textbf{{({letter})}}\\ {n + 1}", f"\\text{{({letter})}}", f"({letter}) -{n}"]
    return Case(str(n), equal, miss)


def _words(rng: random.Random) -> Case:
    word, other = rng.sample(["Friday", "east", "ellipse", "hyperbola", "infinitely many"], 2)
    equal = [word, f"\\text{{{word}}}", f"\\textbf{{{word.upper()}}}", f"\\mathrm{{{word}}}"]
    return Case(f"\\text{{{word}}}", equal, [f"\\text{{{other}}}", f"\\text{{not {word}}}", "5"])


def _matrix(rng: random.Random) -> Case:
    a, b, c, d = (rng.randint(-9, 9) for _ in range(4))
    form = "\\begin{{{0}matrix}} {1} & {2} \\\\ {3} & {4} \\end{{{0}matrix}}"
    equal = [form.format(kind, a, b, c, d) for kind in "pb"]
    return Case(
        equal[0], equal, [form.format("p", a, b, c, d + 1), form.format("p", a - 1, b, c, d)]
    )


def _signs(rng: random.Random) -> Case:
    a, c = rng.randint(1, 20), rng.choice([2, 3, 5, 7])
    both = f"{a}\\pm\\sqrt{{{c}}}"
    equal = [
        both,
        f"{a}+\\sqrt{{{c}}}, {a}-\\sqrt{{{c}}}",
        f"\\{{{a}-\\sqrt{{{c}}},{a}+\\sqrt{{{c}}}\\}}",
    ]
    return Case(both, equal, [f"{a}+\\sqrt{{{c}}}", f"-{both}", f"{a + 1}\\pm\\sqrt{{{c}}}"])


def _scientific(rng: random.Random) -> Case:
    a, n = rng.randint(11, 99) / 10, rng.randint(3, 20)
    equal = [
        f"{a} \\times 10^{{{n}}}",
        f"{a} \\cdot 10^{{{n}}}",
        f"{a}e{n}",
        f"{a}\\times10^{{{n}}}",
    ]
    return Case(equal[0], equal, [f"{a} \\times 10^{{{n + 1}}}", f"{a + 0.1:.1f}e{n}", f"{a}e-{n}"])


def _empty(rng: random.Random) -> Case:
    spellings = ["\\emptyset", "\\varnothing", "\\{\\}", "∅"]
    return Case(rng.choice(spellings), spellings, ["\\{0\\}", "0", "1"])


KINDS: list[Callable[[random.Random], Case]] = [
    *(_integer, _large, _fraction, _mixed, _decimal, _percent, _unit, _area, _noun, _money),
    *(_quantities, _counted, _radical, _quotient, _root_power, _pi, _polynomial, _formula),
    *(_exponential, _complex, _trigonometric, _angle, _elements, _point, _interval, _ray, _line),
    *(_function, _time, _numeral, _choice, _words, _matrix, _signs, _scientific, _empty),
]
