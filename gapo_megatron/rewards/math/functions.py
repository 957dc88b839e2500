r"""Finds where the argument of a function ends.

math-verify reads `\ln 2 \cdot 3` as `\ln 6`, and `\sin A \sin B` as the sine of a product. In
printed mathematics the argument is a bracketed group, or a coefficient (numbers, `\pi`, roots and
fractions of numbers) followed by letters, a group, a root, a fraction or a function. It ends at any
operator, and at a power of e after a letter. A slash before a number belongs to the argument
(`\sin \pi/3`), except of a logarithm (`\ln x/2` is half of `\ln x`).
"""

from __future__ import annotations

import re

from gapo_megatron.rewards.math.boxes import closing_bracket

NAMES = (
    "arcsinh|arccosh|arctanh|arcsin|arccos|arctan|sinh|cosh|tanh|coth|sin|cos|tan|cot|sec|csc"
    "|log|ln|exp"
)
_NESTED = r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
_SCRIPT = rf"\s*[\^_]\s*(?:{_NESTED}|\\[a-zA-Z]+|-?\w)"
_HEAD = re.compile(rf"\\({NAMES})(?![a-zA-Z])((?:{_SCRIPT})*)\s*")
_BEHIND = rf"(?:{_SCRIPT}|\s*[!\0]|')*"
_COEFFICIENT = re.compile(
    rf"\s*(?:\d+(?:\.\d+)?|\\pi(?![a-zA-Z])|\\sqrt\s*(?:\[\d\]\s*)?\{{\d+\}}"
    rf"|\\frac\s*\{{\d+\}}\s*\{{\d+\}}){_BEHIND}"
)
GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    "|upsilon|phi|chi|psi|omega"
)
"""Greek letters for variables: without pi."""
_LETTER = rf"\s*(?:[a-zA-Z]|\\(?:{GREEK})(?![a-zA-Z])){_BEHIND}"
_LETTERS = re.compile(rf"{_LETTER}(?:(?!\s*e\s*\^){_LETTER})*")
_COMMAND = re.compile(rf"\s*\\(?:frac\s*{_NESTED}|sqrt\s*(?:\[[^\]]*\])?|binom\s*{_NESTED})\s*")
_OPEN = re.compile(r"\s*([({|])")
_POSTFIX = re.compile(_BEHIND)
_OVER_NUMBER = re.compile(r"\s*/\s*\d+(?![\d.]*\s*(?:[a-zA-Z(]|\\(?:pi|frac|sqrt)))")


def bracketed(text: str) -> str:
    r"""Put the arguments of functions in parentheses: `\ln(2) \cdot 3`."""
    if "\\" not in text or "\\int" in text:
        return text  # in an integral dx ends an argument
    for head in reversed(functions(text)):
        end = argument_end(text, head)
        argument = text[head.end() : end].strip()
        if not argument:
            continue
        if argument[0] in "({" and closing_bracket(argument, 0) == len(argument):
            argument = argument[1:-1]
        scripts = "".join(sorted(re.findall(_SCRIPT, head[2]), key=lambda one: "^" in one[:2]))
        text = f"{text[: head.start()]}\\{head[1]}{scripts}({argument}){text[end:]}"
    return text


def functions(text: str) -> list[re.Match[str]]:
    """Matches of all functions with their exponent and index, from left to right."""
    return list(_HEAD.finditer(text))


def argument_end(text: str, head: re.Match[str]) -> int:
    """Index after the argument of a function, a match of `functions`."""
    if (end := _group_end(text, head.end())) is not None:
        return end
    end = start = head.end() + (text[head.end() : head.end() + 1] in ("-", "+"))
    while coefficient := _COEFFICIENT.match(text, end):
        end = coefficient.end()
    if letters := _LETTERS.match(text, end):
        end = letters.end()
    elif inner := _HEAD.match(text, end + len(text[end:]) - len(text[end:].lstrip())):
        end = argument_end(text, inner) if end == start else end
    elif command := _COMMAND.match(text, end):
        group = closing_bracket(text, command.end()) if text.startswith("{", command.end()) else 0
        if group and (postfix := _POSTFIX.match(text, group)):
            end = postfix.end()
    elif (group_end := _group_end(text, end)) is not None:
        end = group_end
    over = _OVER_NUMBER.match(text, end) if head[1] not in ("log", "ln") and end > start else None
    return over.end() if over else end if end > start else head.end()


def _group_end(text: str, start: int) -> int | None:
    opening = _OPEN.match(text, start)
    if opening is None:
        return None
    place = opening.start(1)
    end = text.find("|", place + 1) + 1 if opening[1] == "|" else closing_bracket(text, place)
    degrees = re.compile(r"\s*\0").match(text, end) if end else None
    return degrees.end() if degrees else end or None
