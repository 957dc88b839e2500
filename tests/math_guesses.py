"""Answers that a policy would find without the value: each beside a reference that it never equals.

The kinds are those of a search for reward and not of the verifier: equations that are always true,
scaled and shifted values, other signs and steps, infinitesimal differences, lists and ranges that
contain the value, and text that quotes or denies it. They are written around the text of the
reference, so that only the verifier knows what it means. References come from the public
problem sets where these are, and from the generated respellings. Seeded.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.math_respellings import Pair, pairs

DATA = Path(__file__).parents[2] / "shared" / "data"

_LETTER = re.compile(r"(?<![\\a-zA-Z])(?![deifIE])[a-zA-Z](?![a-zA-Z]|\s*\()")
_FORMS = {
    "choice": r"(?:\\text(?:bf)?\s*\{)?\(?[A-E]\)?\}?|\\textbf\{\([A-E]\)\}.*",
    "word": r"\\text\s*\{\s*[A-Za-z ]{3,}\}|[A-Za-z]{4,}",
    "quantity": r"-?[\d.,]+\s*(?:\\,|\\ )?\s*(?:\\(?:text|mathrm|mbox)\s*\{[^{}]*[a-zA-Z][^{}]*\}"
    r"(?:\^\{?\d\}?)?|\\%|\^\{?\\circ\}?)",
    "number": r"-?\d[\d,.]*|-?\\[dt]?frac\s*\{?-?\d+\}?\s*\{?\d+\}?|-?\d+/\d+",
    "equation": r"[^=<>,]*[a-zA-Z)}][^=<>,]*=[^=<>,]+",
    "condition": r"[^,]*(?:<|>|\\(?:leq?|geq?|lt|gt|neq?|in)(?![a-z]))[^,]*"
    r"|(?:\\left)?[(\[][^()\[\]]*\\infty[^()\[\]]*(?:\\right)?[)\]].*",
    "tuple": r"(?:\\left)?\([^()\[\]]*,[^()\[\]]*\)",
    "list": r"(?:\\left)?\\\{.*\}|[^()\[\]]*[^()\[\]\d],[^()\[\]]*|-?\d+,\s*-?\d+(?:,\s*-?\d+)*",
    "expression": r"[^=<>,]*[a-z][^=<>,]*",
    "constant": r"[^=<>,]*\\(?:sqrt|pi)[^=<>,]*",
}  # fmt: skip


def form(reference: str) -> str | None:
    """What a reference is, by its look; None if it is none of the forms."""
    found = [name for name, pattern in _FORMS.items() if re.fullmatch(pattern, reference)]
    if not found or (found[0] in ("equation", "expression", "constant") and "text" in reference):
        return None
    if found[0] == "expression":
        return "expression" if _LETTER.search(reference) else "constant"
    return found[0]


def references(*, seed: int, most: int) -> dict[str, list[str]]:
    """References by form: of the public problem sets, filled up with generated ones."""
    rng = random.Random(seed)
    texts = sorted({pair.reference for pair in pairs(6_000, seed=seed)})
    own = rng.sample(texts, len(texts))
    rows: list[str] = []
    if DATA.is_dir():
        lines = (DATA / "deepscaler/deepscaler_40k_by_difficulty.jsonl").read_text("utf-8")
        rows = sorted({json.loads(line)["answer"].strip(" $.") for line in lines.splitlines()})
        rng.shuffle(rows)
    found: dict[str, list[str]] = {name: [] for name in _FORMS}
    for text in (*rows, *own):
        name = form(text)
        if (
            name
            and len(text) < 80
            and text != "\\{\\}"
            and len(found[name]) < most
            and text not in found[name]
        ):
            found[name].append(text)
    for n in range(600):  # these are few in mathematics
        more = {
            "word": f"\\text{{{chr(97 + n % 26)}o{chr(97 + n // 26)}ati}}",
            "choice": f"\\textbf{{({'ABCDE'[n % 5]})}}\\ {n + 7}",
            "condition": f"x \\{('le', 'ge')[n % 2]} {n + 7}",
        }
        for name, text in more.items():
            found[name] += [text] if len(found[name]) < most else []
    return found


Guess = Callable[[random.Random, str], list[str]]
"""Answers that are never the reference, which is a value E, or an equation L = R."""


def _zero_factors(rng: random.Random, e: str) -> list[str]:
    x = _letter(e)
    return [f"0\\cdot({e})", f"({e})-({e})+10^{{-9}}", f"\\frac{{{e}}}{{10^{{40}}}}", f"{x}-{x}-1"]


_WHOLE = re.compile(r"!|\(-\d|binom|_")
"""What has whole numbers for letters."""


def _scaled(rng: random.Random, e: str) -> list[str]:
    if "0 & 0" in e or ":" in e:
        return []  # zero is its own multiple: 5 - 4 x 3 : 2 + 1
    factor = rng.choice(["2", "3", "10", "100", "-1", "\\frac{1}{2}", "1.01", "\\pi", "10^{20}"])
    return [f"{factor}\\cdot\\left({e}\\right)", f"\\left({e}\\right)\\cdot {factor}"]


def _shifted(rng: random.Random, e: str) -> list[str]:
    shift = rng.choice(["1", "0.1", "\\frac{1}{1000}", "10", "\\pi", "100000", _letter(e)])
    return [f"{e}+{shift}", f"{shift}+\\left({e}\\right)", f"{e}-{shift}"]


def _infinitesimal(rng: random.Random, e: str) -> list[str]:
    if "." in e or "%" in e or "matrix" in e:
        return []  # a decimal may be rounded
    size = rng.choice(["10^{-12}", "10^{-20}", "10^{-40}", "2^{-100}", "\\frac{1}{10^{30}}"])
    x = _letter(e)
    return [f"{e}+{size}", f"\\left({e}\\right)(1+{size})", f"{e}-{size}{x}", f"{e}+{size}{x}^2"]


def _absolute(rng: random.Random, e: str) -> list[str]:
    if re.search("sqrt|log|ln|frac1|/[2-9]", e) or _WHOLE.search(e):
        return []  # its letters may be positive
    x = _letter(e)
    return [
        f"{e}+|{x}|-{x}", f"{e}+|{x}-1|-({x}-1)", f"{e}+|{x}-9|+{x}-9", f"{e}+|{x}|+{x}",
        f"\\frac{{|{x}|}}{{{x}}}\\left({e}\\right)+{x}-|{x}|", f"{e}+\\sqrt{{{x}^2}}-{x}",
    ]  # fmt: skip


def _extreme(rng: random.Random, e: str) -> list[str]:
    if re.search("sqrt|log|ln|frac1|/[2-9]", e) or _WHOLE.search(e):
        return []
    x = _letter(e)
    return [
        f"{e}+\\max({x},0)", f"{e}+\\min(0,{x})", f"{e}+\\max({x}-3,0)", f"{e}+\\min({x}+20,0)",
    ]  # fmt: skip


def _stepped(rng: random.Random, e: str) -> list[str]:
    if re.search(r"!|10\^\{?1\d", e):
        return []  # 0.3217 is less than the error of 15 digits
    x = _letter(e)
    return [
        f"{e}+\\lfloor {x}\\rfloor", f"{e}+\\lceil {x}\\rceil-{x}", f"{e}+{x}-\\lfloor {x}\\rfloor",
        f"\\lfloor {e}\\rfloor+0.3217", f"{e}+\\lfloor\\frac{{{x}}}{{10^6}}\\rfloor",
    ]  # fmt: skip


def _piecewise(rng: random.Random, e: str) -> list[str]:
    x = _letter(e)
    return [
        f"\\begin{{cases}}{e}&{x}>{n}\\\\{other}&{x}\\le {n}\\end{{cases}}"
        for n, other in ((0, "0"), (5, f"{e}+1"), (-3, f"-({e})-7"))
    ]


def _periodic(rng: random.Random, e: str) -> list[str]:
    if _WHOLE.search(e):
        return []
    x = _letter(e)
    return [
        f"{e}+\\sin(2\\pi {x})", f"{e}+\\cos(2\\pi {x})-1", f"{e}+\\sin^2(\\pi {x})",
        f"{e}+\\tan(\\pi {x})", f"{e}+\\sin(1009\\cdot 2\\pi {x}+1)",
    ]  # fmt: skip


def _always_true(rng: random.Random, e: str) -> list[str]:
    left, _, right = e.partition("=") if "=" in e else (_letter(e), "", e)
    x = _letter(e)
    return [
        "0=0", "1=1", f"{x}={x}", f"{x}-{x}=0", f"0{x}=0", f"{left}={left}", f"0({left})=0",
        f"({left})-({right})=({left})-({right})", f"{left}-({left})+{x}-{x}=0", f"{x}^2\\ge 0",
        f"({left}-({right}))\\cdot 0=0", f"2{x}-{x}={x}", f"{x}\\in\\mathbb{{R}}",
        f"({x}+1)^2={x}^2+2{x}+1", f"\\sin^2 {x}+\\cos^2 {x}=1", f"{x}\\ne {x}+1",
    ]  # fmt: skip


def _more_solutions(rng: random.Random, e: str) -> list[str]:
    left, _, right = e.partition("=")
    if right.strip() in ("0", "-1", "- 1") or "." in e or "and" in e:
        return []  # y = 0 is y^2 = 0; a decimal may be rounded
    x = _letter(e)
    # x^y has real values for positive x alone: a negative zero is none of the equation.
    sign = "-" if re.search(r"\^\{?[a-zA-Z]", e) else "+"
    return [
        f"({left}-({right}))({x}-1009)=0", f"({left}-({right}))({x}{sign}77)=0",
        f"|{left}|=|{right}|+1",
        f"{left}={right}+10^{{-12}}", f"{left}=2({right})+1", f"{left}=({right})+0.001{x}",
        f"({left}-({right}))^2={x}^2", f"{left}+{x}={right}", f"{left}={right}+|{x}|+1",
    ]  # fmt: skip


def _lists(rng: random.Random, e: str) -> list[str]:
    return [
        f"{e}, {e}+1", f"\\{{{e}, 1009\\}}", f"{e}\\text{{ or }}1009", f"1009\\text{{ or }}{e}",
        f"x={e}\\text{{ or }}x=1009", f"{e}\\pm 1", f"\\pm\\left({e}\\right)+1", f"{e}, 1, 2, 3",
        f"1\\text{{ and }}{e}\\text{{ and }}1009", f"\\{{{e}\\}}\\cup\\{{1009\\}}", f"({e}, 1009)",
        f"{e}; 1009", f"{e} \\lor 1009", f"1009, {e}", f"{e}\\\\1009", f"{e} / 1009",
        f"\\mathbb{{R}}\\ni {e}", f"0,1,2,3,4,5,6,7,8,9,\\ldots,{e},\\ldots", f"{e}\\vee 1009",
    ]  # fmt: skip


def _ranges(rng: random.Random, e: str) -> list[str]:
    return [
        "(-\\infty,\\infty)", "\\mathbb{R}", f"[{e},\\infty)", f"x\\le {e}", f"\\ge {e}", f"<{e}",
        f"[{e}-1,{e}+1]", f"{e}\\le x\\le {e}+1", f"x\\ne {e}", f"\\ne {e}", f"x>{e}-1",
        f"\\mathbb{{R}}\\setminus\\{{{e}\\}}", f"x\\in[{e},{e}+1]", "-\\infty<x<\\infty",
        "\\emptyset",
    ]  # fmt: skip


_BEFORE = (
    "anything but,not,the opposite of,wrong:,someone else said,different to,different from,unlike"
    ",unequal to,the answer is not,never,it is not true that it is,all except,half of,twice,minus"
    ",one more than,about,either this or not,the negation of,far from,no,instead of,other than"
    ",except for,not exactly,nearly,false:,at most,at least,close to,the reciprocal of"
)
_BEHIND = (
    "is wrong,is false,is not it,(incorrect),is impossible,or not,or anything else,?,is a guess"
    ",isn't right,no,not,plus or minus anything,or so,maybe,is too small,minus one,times two"
    ",would be nonsense,was rejected,or less,or more,does not work"
)


def _quoted(rng: random.Random, e: str) -> list[str]:
    before = [f"\\text{{{one} }}{e}" for one in rng.sample(_BEFORE.split(","), 6)]
    return [*before, f"\\text{{“}}{e}\\text{{” is what I would not say}}"]


def _denied(rng: random.Random, e: str) -> list[str]:
    behind = [f"{e}\\text{{ {one}}}" for one in rng.sample(_BEHIND.split(","), 6)]
    return [
        *behind,
        f"\\text{{({e}) is wrong}}",
        f"\\text{{{e} is wrong}}" if "\\" not in e else "?",
    ]


def _struck(rng: random.Random, e: str) -> list[str]:
    half = len(e) // 2
    return [
        f"\\cancel{{{e}}}", f"\\xcancel{{{e}}}", f"\\sout{{{e}}}", f"\\lnot {e}", f"\\neg({e})",
        f"\\phantom{{{e}}}", f"\\not{{{e}}}", f"\\overset{{?}}{{{e}}}1", f"{e}\\rlap{{/}}",
        f"\\nexists {e}",
        *([f"{e[:half]}\\phantom{{0}}{e[half:]}"] if e.isdigit() and 0 < half < 2 else []),
        *([f"{e[:half]}\\hspace{{1em}}{e[half:]}"] if e.isdigit() and 0 < half < 2 else []),
    ]  # fmt: skip


def _every_choice(rng: random.Random, e: str) -> list[str]:
    mine = re.search("[A-E](?![a-z])", e)
    letter = mine[0] if mine else "B"
    other = "C" if letter != "C" else "D"
    return [
        "ABCDE", "A, B, C, D, E", "(A)(B)(C)(D)(E)", f"{letter}\\text{{ or }}{other}", "A/B/C/D/E",
        f"\\text{{({letter}) is wrong}}", f"\\text{{not {letter}}}",
        f"\\text{{({letter}) or ({other})}}",
        f"\\text{{{letter} is not right}}", f"\\text{{{letter}}}\\text{{ and }}\\text{{{other}}}",
        f"\\text{{all but {letter}}}", f"\\text{{{letter}, {other}}}", f"({letter}) ({other})",
        f"\\text{{({letter}) false}}", f"\\neg {letter}", f"{letter}\\to {other}",
        f"{letter}={other}",
    ]  # fmt: skip


def _other_words(rng: random.Random, e: str) -> list[str]:
    word = re.sub(r"\\text\s*\{|\}", "", e).strip()
    return [
        f"\\text{{not {word}}}", f"\\text{{{word} or its opposite}}", f"\\text{{un{word}}}",
        f"\\text{{neither {word}}}", f"\\text{{{word}}}\\text{{ or not}}",
        f"\\text{{{word} is wrong}}",
        f"\\text{{never {word}}}", f"\\text{{yes no {word}}}", "\\text{it depends}",
        f"\\text{{{word}, no}}", f"\\text{{everything but {word}}}",
    ]  # fmt: skip


def _other_units(rng: random.Random, e: str) -> list[str]:
    number = re.match(r"-?[\d.,]+", e)
    value = number[0].rstrip(".,") if number else "7"
    return [
        f"{value}1{e[len(value) :]}", f"{value}\\text{{ million}}\\text{{ zlotys}}",
        f"{value}\\text{{ to }}1009", f"{value}\\text{{ or }}1009", f"{value}\\text{{ dozen}}",
        f"{value}\\text{{ hundredths}}", f"{value}\\text{{ x}}", f"\\sqrt{{{value}}}+1009",
        f"{value}\\text{{ squared minus }}3",
    ]  # fmt: skip


GUESSES: dict[str, tuple[Guess, tuple[str, ...]]] = {
    "zero factors": (_zero_factors, ("number", "constant", "expression")),
    "scaled": (_scaled, ("constant", "expression")),
    "shifted": (_shifted, ("number", "constant", "expression")),
    "infinitesimal": (_infinitesimal, ("number", "constant", "expression")),
    "absolute values": (_absolute, ("number", "constant", "expression")),
    "least and greatest": (_extreme, ("number", "constant", "expression")),
    "floors": (_stepped, ("number", "constant", "expression")),
    "piecewise": (_piecewise, ("number", "constant", "expression")),
    "periodic": (_periodic, ("number", "constant", "expression")),
    "always true": (_always_true, ("number", "constant", "expression", "equation", "condition")),
    "more solutions": (_more_solutions, ("equation",)),
    "lists": (_lists, ("number", "constant", "expression", "tuple", "quantity")),
    "ranges": (_ranges, ("number", "constant", "expression", "list", "tuple")),
    "quoted": (_quoted, tuple(_FORMS)),
    "denied": (_denied, tuple(_FORMS)),
    "struck": (_struck, tuple(name for name in _FORMS if name != "word")),
    "every choice": (_every_choice, ("choice",)),
    "other words": (_other_words, ("word",)),
    "other units": (_other_units, ("quantity",)),
}
"""By kind: the answers, and the forms of reference that they are made for."""


def _letter(e: str) -> str:
    """A letter of the reference; x if it has none."""
    found = sorted(set(_LETTER.findall(e)))
    return "x" if "x" in found or not found or e == found[0] else found[0]


def guesses(count: int, *, seed: int) -> Iterator[Pair]:
    """So many pairs, none of them equal: of every kind as many."""
    rng = random.Random(seed)
    known = references(seed=seed, most=200 + count // 40)
    number = 0
    while number < count:
        for kind, (guess, forms) in GUESSES.items():
            reference = rng.choice(known[rng.choice(forms)])
            for given in rng.sample(options, 1) if (options := guess(rng, reference)) else ():
                yield Pair(reference, given, False, kind)
                number += 1
