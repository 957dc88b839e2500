"""Replaces Unicode signs by LaTeX of the same meaning; others stay and cannot be read."""

# ruff: noqa: RUF001 (signs that look like others are the subject)
from __future__ import annotations

import re
import unicodedata

from gapo_megatron.rewards.math.boxes import closing_bracket
from gapo_megatron.rewards.math.functions import GREEK

_LATEX = {
    "\u2212\u2013\u2011\u2010": "-", "\u00d7\u2715": "\\times ", "·⋅\u2219\u2062": "\\cdot ",
    "÷\u2215\u2044": "/", "\u2217": "*", "∞": "\\infty ", "≤⩽": "\\le ", "≥⩾": "\\ge ",
    "≠": "\\ne ", "±": "\\pm ", "∓": "\\mp ", "\u222a": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
    "∅Ø": "\\emptyset ", "…⋯": "\\ldots ", "≈": "\\approx ", "≡": "\\equiv ", "⌊": "\\lfloor ",
    "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "⟨": "\\langle ", "⟩": "\\rangle ",
    "∧": "\\land ", "\u2228": "\\lor ", "∀": "\\forall ", "\u2223": "|", "\u2032\u2019": "'",
    "\u2033\u201d": "''", "\u02da\u00ba": "°", "℃": "°C", "℉": "°F", "ℓ": "l", "ℝ": "\\mathbb{R}",
    "ℚ": "\\mathbb{Q}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℂ": "\\mathbb{C}",
    "\u060c\u3001\u2063": ",", "\u066b": ".", "\u3002": ".", "ϕ": "\\phi ", "ϵ": "\\epsilon ",
    # Invisible signs without meaning.
    "\u200b\u200c\u200d\u2060\u2061\ufeff\u200e\u200f": "",
}  # fmt: skip
_CAPITALS = "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"
_GREEK = {"CAPITAL": _CAPITALS.split(), "SMALL": [*GREEK.split("|"), "pi"]}
_TABLE = str.maketrans(
    {sign: latex for signs, latex in _LATEX.items() for sign in signs}
    | {  # Unicode spells it lamda
        unicodedata.lookup(f"GREEK {case} LETTER {name.upper().replace('MBD', 'MD')}"): f"\\{name} "
        for case, names in _GREEK.items()
        for name in names
    }
)
_SAME = ("<font>", "<wide>", "<narrow>", "<noBreak>")
"""Decompositions that change only the look: no circles, squares or roman numerals."""

_ROOTS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
_RADICAND = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[a-zA-Z]")


def fold(text: str) -> str:
    r"""Write x⁴, 3¾, ٤٢, √12 as x^4, 3\frac{3}{4}, 42, \sqrt{12}.

    A root extends over the number, letter, command or brackets after it.
    """
    if text.isascii():
        return text
    text = "".join(map(_folded, _fold_scripts(text)))
    while (place := max(map(text.rfind, _ROOTS))) >= 0:  # from right to left: inner roots first
        behind = text[place + 1 :].lstrip()
        text = text[:place] + _ROOTS[text[place]] + _with_radicand(behind)
    return text


def _fold_scripts(text: str) -> str:
    """Write runs of superscripts or subscripts as one exponent or index."""
    parts: list[str] = []
    script = ""
    for sign in text:
        kind = unicodedata.decomposition(sign).partition(" ")[0]
        now = {"<super>": "^", "<sub>": "_"}.get(kind, "") if sign not in "ºª" else ""
        if script and now != script:
            parts.append("}")
        if now and now != script:
            parts.append(now + "{")
        parts.append(unicodedata.normalize("NFKC", sign) if now else sign)
        script = now
    joined = "".join(parts) + ("}" if script else "")
    return re.sub(r"([\^_])\{(\w)\}(?!\w)", r"\1\2", joined)  # cm^2, also within text


def _folded(sign: str) -> str:
    if sign.isascii() or sign in _ROOTS:
        return sign
    latex = sign.translate(_TABLE)
    if latex != sign:
        return latex
    if (digit := unicodedata.decimal(sign, None)) is not None:
        return str(digit)
    kind = unicodedata.decomposition(sign).partition(" ")[0]
    plain = unicodedata.normalize("NFKC", sign)
    if kind == "<fraction>" and not plain.endswith("\u2044"):
        return "\\frac{{{}}}{{{}}}".format(*plain.split("\u2044"))
    return plain.translate(_TABLE) if kind in _SAME else sign


def _with_radicand(text: str) -> str:
    """Put braces around the radicand at the start of `text`."""
    end = closing_bracket(text, 0) if text.startswith(("(", "[", "{")) else 0
    if end:
        return f"{{{text[1 : end - 1]}}}{text[end:]}"
    number = _RADICAND.match(text)
    if number:
        return f"{{{number[0]}}}{text[number.end() :]}"
    return f" {text}"
