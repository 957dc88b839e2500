"""Replaces Unicode signs by LaTeX of the same meaning; others stay and cannot be read."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

from gapo_megatron.rewards.math.boxes import closing_bracket

TABLES = json.loads(Path(__file__).with_name("signs.json").read_text("utf-8"))
"""LaTeX by Unicode signs, by ASCII signs, and the names of each command."""
_TABLE = str.maketrans({sign: latex for signs, latex in TABLES["signs"].items() for sign in signs})
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
