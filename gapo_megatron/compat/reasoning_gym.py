"""Parts of the package reasoning-gym that would execute texts as Python (0.1.25)."""

from __future__ import annotations

import ast
import builtins
import importlib
import keyword
import re
from typing import Any

REFUSED = ("codeio",)
"""Families that execute the code of a data set, with the user's rights, to make their problems."""
_LITERALS = (
    *("algorithmic.binary_matrix", "algorithmic.number_sorting", "algorithmic.spiral_matrix"),
    *("algorithmic.string_insertion", "games.n_queens"),
)
"""Modules that call `eval` on an answer, to read a list."""
_EXPRESSIONS = {
    "games.countdown": "parse_expr",
    "games.puzzle24": "parse_expr",
    "algebra.simple_integration": "sympy",
    "algebra.intermediate_integration": "sympy",
    "algebra.polynomial_multiplication": "sp",
}
"""Modules that let sympy read an answer, which calls `eval`, and their name for it."""
_ARITHMETIC = "arithmetic.bitwise_arithmetic"
"""Module that calls `eval` on a problem, which a file of problems may hold."""
_HEXADECIMAL = re.compile(r"(?:0x[0-9a-f]+|<<|>>|[-+*() ])*")
_NUMBER = re.compile(r"\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?")
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = ("sqrt", "abs", "True", "False", "None")
"""Names of Python and sympy without a class of sympy, which formulas may have."""
_CHARACTERS = re.compile(r"[\w\s+\-*/^%(),!=<>&|~]*", re.ASCII)


def read_answers_safely() -> None:
    """Let the package's scores read literals and formulas in answers, and nothing else.

    What they cannot read is for them an answer that is no list or no formula. For the process that
    scores; to be called once.
    """
    # Uses: `eval`, `parse_expr`, `sympy` and `sp` in modules of the package
    # Versions: reasoning-gym 0.1.25
    # Upstream: none found
    for name in _LITERALS:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
    vars(importlib.import_module(f"reasoning_gym.{_ARITHMETIC}"))["eval"] = _calculate
    for name, attribute in _EXPRESSIONS.items():
        safe = _parse_formula if attribute == "parse_expr" else _Sympy()
        vars(importlib.import_module(f"reasoning_gym.{name}"))[attribute] = safe


def _calculate(text: str) -> int:
    """The value of hexadecimal numbers with `+ - * << >>` and brackets.

    Raises:
        ValueError: the text has anything else.
    """
    if not _HEXADECIMAL.fullmatch(text) or "**" in text:
        raise ValueError(f"no arithmetic: {text[:60]!r}")
    return int(eval(text, {"__builtins__": {}}))


class _Sympy:
    """The module sympy, whose `parse_expr` reads formulas only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("sympy"), name)

    def parse_expr(self, text: str, **options: Any) -> Any:
        return _parse_formula(text, **options)


def _parse_formula(text: str, **options: Any) -> Any:
    """`sympy.parse_expr` of a formula; `options` are its own.

    Raises:
        ValueError: the text has a name that is neither a function, a constant nor new to sympy; or
            characters of no formula, such as quotes, brackets and dots outside of numbers.
    """
    import sympy

    rest = _NUMBER.sub("0", text)
    if not _CHARACTERS.fullmatch(rest):
        raise ValueError(f"no formula: {text[:60]!r}")
    for name in {*_NAME.findall(rest)}:
        found = getattr(sympy, name, None)
        is_class = isinstance(found, type) and issubclass(found, sympy.Expr)
        is_known = isinstance(found, sympy.Basic) or is_class
        is_taken = hasattr(sympy, name) or hasattr(builtins, name) or keyword.iskeyword(name)
        if "__" in name or (is_taken and not is_known and name not in _PLAIN):
            raise ValueError(f"no formula: {name!r} in {text[:60]!r}")
    return sympy.parse_expr(text, **options)
