"""Pairs of the tables, respelled: what is equal stays so, and what is not does not become equal."""

# ruff: noqa: RUF001 (signs that look like others are the subject)
from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import pytest

from gapo_megatron.config import RewardConfig
from gapo_megatron.rewards import math, start_pool
from gapo_megatron.types import Outcome, Verdict
from tests.math_pairs import Pair, table_pairs

Change = Callable[[random.Random, str], str]


def _spaces(rng: random.Random, text: str) -> str:
    space = rng.choice([" ", "\\,", "\\ ", "~", "\\;", "  "])
    return re.sub(r"(?<=[+=,<>])(?=[^\s}\\=])(?!\d{3}(?:\D|$))", lambda _: space, text)


def _larger(rng: random.Random, text: str) -> str:
    return text.replace("\\frac", rng.choice(["\\dfrac", "\\tfrac", "\\cfrac"]))


def _sized(rng: random.Random, text: str) -> str:
    if re.search(r"\\left|\\[{(]", text) or text.count("(") != text.count(")"):
        return text
    left, right = rng.choice([("\\left", "\\right"), ("\\bigl", "\\bigr"), ("\\big", "\\big")])
    return text.replace("(", f"{left}(").replace(")", f"{right})")


def _ended(rng: random.Random, text: str) -> str:
    return text + rng.choice([".", " ", "\\,", "\n"])


def _wrapped(rng: random.Random, text: str) -> str:
    return rng.choice(["${}$", "\\({}\\)", "{{{}}}", " {} ", "\\displaystyle {}"]).format(text)


def _short(rng: random.Random, text: str) -> str:
    root = rng.choice([r"\\sqrt\1", r"\\sqrt \1"])
    text = re.sub(r"\\sqrt\{(\d)\}(?![\d{])", root, text)
    return re.sub(r"\\(frac)\{(\d)\}\{(\d)\}(?!\d)", r"\\\1\2\3", text)


_RAISED = str.maketrans("0123456789-+n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ")
_SIGNS = {"-": "−", "\\cdot": "·", "\\times": "×", "\\pi": "π", "\\infty": "∞", "\\le": "≤"}
_ZEROS = "\uff10\u0660\u0966\u09e6\u06f0\U0001d7ce\U0001d7e2"  # of digits in other scripts


def _unicode(rng: random.Random, text: str) -> str:
    raised = re.compile(r"\^(?:\{([-+]?[0-9]+)\}|([0-9]|n\b))")
    text = raised.sub(lambda match: (match[1] or match[2]).translate(_RAISED), text)
    text = re.sub(r"\\sqrt\{([^{}]*)\}", r"√(\1)", text)
    for latex, sign in _SIGNS.items():
        if rng.random() < 0.7:
            text = re.sub(rf"{re.escape(latex)}(?![a-zA-Z])", sign, text)
    return text


def _digits(rng: random.Random, text: str) -> str:
    zero = ord(rng.choice(_ZEROS))
    return "".join(chr(zero + int(sign)) if sign in "0123456789" else sign for sign in text)


CHANGES: list[Change] = [_spaces, _larger, _sized, _ended, _wrapped, _short, _unicode, _digits]
INTRODUCTIONS = ["\\text{{The answer is }} {}", "\\text{{Area}} = {}", "\\text{{(b) }}{}"]
_NO_VALUE = re.compile(
    r"[=<>?:'°%]|[A-Z]\)?|\{\}|[a-z]{3} |\d [a-z]{2}"
    r"|\\(?:le|ge|ne|in|text|not|forall|degree)\b"
)


def respelled(rng: random.Random, pair: Pair) -> Pair:
    """The same answer with other spacing, commands, brackets, signs or words around it."""
    given = pair.given
    if re.search(r"\{\}|circ|°", given):
        return pair
    is_value = not (_NO_VALUE.search(given) or "=" in pair.reference)
    for change in rng.sample(CHANGES, rng.randint(1, 2)):
        given = change(rng, given)
    if is_value and rng.random() < 0.25:
        given = rng.choice(INTRODUCTIONS).format(given)
    return pair._replace(given=given)


def _check(made: Sequence[Pair], verdicts: Sequence[Verdict]) -> None:
    outcomes = dict(zip(made, (one.outcome for one in verdicts), strict=True))
    wrong = {pair: one for pair, one in outcomes.items() if (one == "correct") != pair.is_equal}
    assert wrong == {}
    # Words on no list, mostly; hardly any spelling adds to them.
    assert [*outcomes.values()].count(Outcome.UNKNOWN) <= 0.05 * len(outcomes)


def _response(pair: Pair) -> str:
    return f"So $\\boxed{{{pair.given}}}$."


def test_respelled_pairs_are_judged_as_before():
    rng = random.Random(0)
    known = rng.sample([*table_pairs()], 300)
    made = [respelled(rng, pair) for pair in known]
    assert len({*made} - {*known}) > 150
    _check(made, [math.verify(_response(one), one.reference) for one in made])


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_thousands_of_respelled_pairs_are_judged_as_before(seed):
    rng = random.Random(seed)
    made = [respelled(rng, pair) for pair in [*table_pairs()] * 4]
    with start_pool(RewardConfig(kind="math", timeout_s=60), num_workers=2) as pool:
        _check(made, pool.judge([(_response(one), one.reference) for one in made]))
