"""Answers that a policy would find without the value: each beside a reference that it never equals.

The kinds are those of a search for reward and not of the verifier: equations that are always true,
scaled and shifted values, other signs and steps, infinitesimal differences, lists and ranges that
contain the value, and text that quotes or denies it. They are written around the text of the
reference, so that only the verifier knows what it means. References come from the public
problem sets where these are, and from the tables of the grader's tests. Seeded.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tests.math_pairs import Pair, table_pairs

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
    """References by form: of the public problem sets, filled up with those of the tables."""
    rng = random.Random(seed)
    texts = sorted({pair.reference for pair in table_pairs()})
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
            "equation": f"y={n + 2}x+{n + 3}",
            "tuple": f"({n + 3},{n - 20})",
            "list": f"{n + 3}, {n - 20}",
            "quantity": f"{n + 7}\\text{{ cm}}",
        }
        for name, text in more.items():
            found[name] += [text] if len(found[name]) < most else []
    return found


# Templates: @ is the reference, # one of its letters, or x.
_ANYWHERE = ("number", "constant", "expression")
_WHOLE = r"!|\(-\d|binom|_"
"""What has whole numbers for letters."""
_POSITIVE = rf"sqrt|log|ln|frac1|/[2-9]|\^\{{?[a-zA-Z\\]|{_WHOLE}"
"""What may have positive letters alone, or whole ones."""
_FACTORS = ["2", "3", "10", "100", "-1", r"\frac{1}{2}", "1.01", r"\pi", "10^{20}"]
_SHIFTS = ["1", "0.1", r"\frac{1}{1000}", "10", r"\pi", "100000", "#"]
_TINY = ["10^{-12}", "10^{-20}", "10^{-40}", "2^{-100}", r"\frac{1}{10^{30}}"]
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

Kind = tuple[tuple[str, ...], str, list[str]]
"""Forms of reference, a pattern of those that it may equal after all, and templates."""
KINDS: dict[str, Kind] = {
    "zero factors": (_ANYWHERE, "", [
        r"0\cdot(@)", "(@)-(@)+10^{-9}", r"\frac{@}{10^{40}}", "#-#-1009",
    ]),
    # Zero is its own multiple: 5 - 4 x 3 : 2 + 1.
    "scaled": (("constant", "expression"), "0 & 0|:", [
        template.replace("FACTOR", one) for one in _FACTORS
        for template in (r"FACTOR\cdot\left(@\right)", r"\left(@\right)\cdot FACTOR")
    ]),
    "shifted": (_ANYWHERE, "", [
        template.replace("SHIFT", one) for one in _SHIFTS
        for template in ("@+SHIFT", r"SHIFT+\left(@\right)", "@-SHIFT")
    ]),
    # A decimal may be rounded.
    "infinitesimal": (_ANYWHERE, r"[.%]|matrix", [
        template.replace("TINY", one) for one in _TINY
        for template in ("@+TINY", r"\left(@\right)(1+TINY)", "@-TINY#", "@+TINY#^2")
    ]),
    "absolute values": (_ANYWHERE, _POSITIVE, [
        "@+|#|-#", "@+|#-1|-(#-1)", "@+|#-9|+#-9", "@+|#|+#",
        r"\frac{|#|}{#}\left(@\right)+#-|#|", r"@+\sqrt{#^2}-#",
    ]),
    "least and greatest": (_ANYWHERE, _POSITIVE, [
        r"@+\max(#,0)", r"@+\min(0,#)", r"@+\max(#-3,0)", r"@+\min(#+20,0)",
    ]),
    # 0.3217 is less than the error of 15 digits.
    "floors": (_ANYWHERE, r"!|10\^\{?1\d", [
        r"@+\lfloor #\rfloor", r"@+\lceil #\rceil-#", r"@+#-\lfloor #\rfloor",
        r"\lfloor @\rfloor+0.3217", r"@+\lfloor\frac{#}{10^6}\rfloor",
    ]),
    "piecewise": (_ANYWHERE, "", [
        rf"\begin{{cases}}@&#>{n}\\{other}&#\le {n}\end{{cases}}"
        for n, other in ((0, "0"), (5, "@+1"), (-3, "-(@)-7"))
    ]),
    "periodic": (_ANYWHERE, _WHOLE, [
        r"@+\sin(2\pi #)", r"@+\cos(2\pi #)-1", r"@+\sin^2(\pi #)", r"@+\tan(\pi #)",
        r"@+\sin(1009\cdot 2\pi #+1)",
    ]),
    # x - (x / 2) is x / 2.
    "always true": ((*_ANYWHERE, "equation", "condition"), r"x/2|x\}?\{?2", [
        "0=0", "1=1", "#=#", "#-#=0", "0#=0", r"#^2\ge 0", "2#-#=#", r"#\in\mathbb{R}",
        "(#+1)^2=#^2+2#+1", r"\sin^2 #+\cos^2 #=1", r"#\ne #+1", "LEFT=LEFT", "0(LEFT)=0",
        "(LEFT)-(RIGHT)=(LEFT)-(RIGHT)", "LEFT-(LEFT)+#-#=0", r"(LEFT-(RIGHT))\cdot 0=0",
    ]),
    # y = 0 is y^2 = 0; a decimal may be rounded; x^y has real values for positive x alone.
    "more solutions": (("equation",), r"=\s*(?:0|- ?1)\s*$|\.|and|\^\{?[a-zA-Z]", [
        "(LEFT-(RIGHT))(#-1009)=0", "(LEFT-(RIGHT))(#+77)=0", "|LEFT|=|RIGHT|+1",
        "LEFT=RIGHT+10^{-12}", "LEFT=2(RIGHT)+1", "LEFT=(RIGHT)+0.001#",
        "(LEFT-(RIGHT))^2=#^2", "LEFT+#=RIGHT", "LEFT=RIGHT+|#|+1",
    ]),
    "lists": ((*_ANYWHERE, "tuple", "quantity"), "", [
        "@, @+1", r"\{@, 1009\}", r"@\text{ or }1009", r"1009\text{ or }@",
        r"x=@\text{ or }x=1009", r"@\pm 1", r"\pm\left(@\right)+1", "@, 1, 2, 3",
        r"1\text{ and }@\text{ and }1009", r"\{@\}\cup\{1009\}", "(@, 1009)", "@; 1009",
        r"@ \lor 1009", "1009, @", r"@\\1009", "@ / 1009", r"\mathbb{R}\ni @",
        r"0,1,2,3,4,5,6,7,8,9,\ldots,@,\ldots", r"@\vee 1009",
    ]),
    "ranges": ((*_ANYWHERE, "list", "tuple"), "", [
        r"(-\infty,\infty)", r"\mathbb{R}", r"[@,\infty)", r"x\le @", r"\ge @", "<@", "[@-1,@+1]",
        r"@\le x\le @+1", r"x\ne @", r"\ne @", "x>@-1", r"\mathbb{R}\setminus\{@\}",
        r"x\in[@,@+1]", r"-\infty<x<\infty", r"\emptyset",
    ]),
    "quoted": (tuple(_FORMS), "", [
        *(f"\\text{{{one} }}@" for one in _BEFORE.split(",")),
        r"\text{“}@\text{” is what I would not say}",
    ]),
    "denied": (tuple(_FORMS), "", [
        *(f"@\\text{{ {one}}}" for one in _BEHIND.split(",")),
        *(r"\text{(@) is wrong}", r"\text{@ is wrong}"),
    ]),
    "struck": (tuple(name for name in _FORMS if name != "word"), "", [
        r"\cancel{@}", r"\xcancel{@}", r"\sout{@}", r"\lnot @", r"\neg(@)", r"\phantom{@}",
        r"\not{@}", r"\overset{?}{@}1", r"@\rlap{/}", r"\nexists @", r"@\phantom{0}7",
        r"@\hspace{1em}7",
    ]),
    "every choice": (("choice",), "", [
        "ABCDE", "A, B, C, D, E", "(A)(B)(C)(D)(E)", r"MINE\text{ or }OTHER", "A/B/C/D/E",
        r"\text{(MINE) is wrong}", r"\text{not MINE}", r"\text{(MINE) or (OTHER)}",
        r"\text{MINE is not right}", r"\text{MINE}\text{ and }\text{OTHER}", "(MINE) (OTHER)",
        r"\text{all but MINE}", r"\text{MINE, OTHER}", r"\text{(MINE) false}", r"\neg MINE",
        r"MINE\to OTHER", "MINE=OTHER",
    ]),
    "other words": (("word",), "", [
        r"\text{not WORD}", r"\text{WORD or its opposite}", r"\text{unWORD}",
        r"\text{neither WORD}", r"\text{WORD}\text{ or not}", r"\text{WORD is wrong}",
        r"\text{never WORD}", r"\text{yes no WORD}", r"\text{it depends}", r"\text{WORD, no}",
        r"\text{everything but WORD}",
    ]),
    "other units": (("quantity",), "", [
        "NUMBER1UNIT", r"NUMBER\text{ million}\text{ zlotys}", r"NUMBER\text{ to }1009",
        r"NUMBER\text{ or }1009", r"NUMBER\text{ dozen}", r"NUMBER\text{ hundredths}",
        r"NUMBER\text{ x}", r"\sqrt{NUMBER}+1009", r"NUMBER\text{ squared minus }3",
    ]),
}  # fmt: skip


def _filled(template: str, e: str) -> str:
    """The template for a reference: its sides, its letter as a choice, its words, its number."""
    letters = sorted(set(_LETTER.findall(e)))
    # Of a lone letter |v| v : v + v - |v| is v.
    x = "x" if "x" in letters or not letters or re.fullmatch(r"\W*\w\W*", e) else letters[0]
    left, _, right = e.partition("=") if "=" in e else (x, "", e)
    choice = re.search("[A-E](?![a-z])", e)
    mine = choice[0] if choice else "B"
    number = re.match(r"-?[\d.,]*\d|", e)
    parts = {
        **{"@": e, "#": x, "LEFT": left, "RIGHT": right, "MINE": mine},
        **{"OTHER": "C" if mine != "C" else "D", "WORD": re.sub(r"\\text\s*\{|\}", "", e).strip()},
        **{"NUMBER": number[0] if number else "7", "UNIT": e[number.end() if number else 0 :]},
    }
    return re.sub("|".join(parts), lambda part: parts[part[0]], template)


def guesses(count: int, *, seed: int) -> Iterator[Pair]:
    """So many pairs, none of them equal: of every kind as many."""
    rng = random.Random(seed)
    known = references(seed=seed, most=200 + count // 40)
    number = 0
    while number < count:
        for kind, (forms, may_be_equal, templates) in KINDS.items():
            reference = rng.choice(known[rng.choice(forms)])
            if not (may_be_equal and re.search(may_be_equal, reference)):
                yield Pair(reference, _filled(rng.choice(templates), reference), False, kind)
                number += 1
