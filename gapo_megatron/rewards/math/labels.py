"""Recognises labels before a value: known words that name it, and other sides of an equation.

Any other word or sign may change the value (wrong, half, all except), so it is no label.
"""

from __future__ import annotations

import re

from gapo_megatron.rewards.math import expressions
from gapo_megatron.rewards.math.functions import GREEK
from gapo_megatron.rewards.math.nouns import WORDS, is_noun
from gapo_megatron.rewards.math.parsing import RELATION
from gapo_megatron.rewards.math.spelling import FUNCTIONS
from gapo_megatron.rewards.math.units import read_unit

_NAMES = WORDS["nouns"] | WORDS["labels"] | WORDS["label_endings"]
_MODIFIERS = WORDS["modifiers"] | WORDS["numeric"]
_KNOWN = WORDS["commands"].union(GREEK.split("|"), FUNCTIONS.split("|"), ["binom", "pi"])
_OF_LETTERS = re.compile(r"(?:(?<=\bof)|(?<=angle)) (?:[A-Z]{1,4}|[a-z])\b")  # Area of ABCD


def names_value(text: str, *, is_named: bool) -> bool:
    """Whether words only introduce the value after them; `is_named` if a sign is in between."""
    text = re.sub(r"\b(equals?) to\b", r"\1", _OF_LETTERS.sub("", text))
    words = [word.strip(".,:=()").lower() for word in text.split()]
    is_whole = is_named or not words or text.rstrip()[-1] in ":="
    if not is_whole and words[-1] not in WORDS["label_endings"]:
        return False
    return all(
        not word
        or _NAMES & {word, word.removesuffix("s")}
        or read_unit(word)
        or (word in _MODIFIERS and (behind in _MODIFIERS or is_noun(behind)))  # real roots
        for word, behind in zip(words, [*words[1:], ""], strict=True)
    )


_ARGUMENT = re.compile(  # P(A|B) is some P, \text{AB} is AB; but 3\text{ N} has a unit
    r"(?<![a-zA-Z\\])((?![ei])[a-zA-Z]\}?)\s*\([^()]*\)|\\gcd\s*\([^()]*[a-z][^()]*\)"
    r"|(?<![\d})])(?<![\d})]\s)\\text\{\s*((?!NO)[A-Z]{1,2}|[a-z])\s*\}"
)
_DECORATION = re.compile(
    r"\\(?:bar|hat|tilde|vec|overline|widehat|widetilde|overrightarrow|mathbb|mathcal|det|deg|dim"
    r"|Re|Im|Pr|therefore|(?:max|min)(?!\s*[({])|(?:sum|prod)(?!\s*_))(?![a-zA-Z])|\\#"
)
_NAMED = re.compile(
    r"\\text\{([^{}]*)\}|(?<![a-zA-Z\\])([a-zA-Z]{4,}|[Nn]ot?)(?![a-zA-Z])|_\{[a-z]{3,}\}"
)
_SOME_NAME = "\\Upsilon "
_WORDED = re.compile(
    r"(?:[A-Za-z\s(){}',]|_\{?\d+\}?|_|\\(?:Upsilon|Omega|triangle|angle)(?![a-zA-Z]))*"
)
_OPERATOR = re.compile(r"\\(?:cup|cap|circ|star|ast|oplus|otimes|diamond)(?![a-zA-Z])")


def is_name(text: str, reference: str) -> bool:
    """Whether a side of an equation names a value: AB, P(A), Area, m + n, x^2.

    The question is not known here, so -x = 42 and x^2 = 42 also state 42.
    """
    if text in ("e", "i", "\\gamma", "\\Gamma"):  # alone on a side they are variables
        return True
    text = _ARGUMENT.sub(
        lambda match: match[1] or match[2] or "\\Omega ", _DECORATION.sub("", text)
    )
    text = _NAMED.sub(_name, text)
    if _SOME_NAME in text and not _WORDED.fullmatch(text):
        return False  # twice the answer
    text = _OPERATOR.sub(lambda _: f"+{_SOME_NAME}+", text)
    commands = re.findall(r"\\([a-zA-Z]+)", text)
    is_known = all(_KNOWN & {one, one.lower().removeprefix("var")} for one in commands)
    return is_known and not RELATION.search(text) and expressions.names(text, reference)


def _name(match: re.Match[str]) -> str:
    """Replace known words and an index by a letter, and other words by an unreadable sign."""
    words = match[1] or match[2]
    if words is None:
        return "_{\\Omega}"
    if match[2] and len(words) > 3 and not is_word(words):
        return words
    return _SOME_NAME if names_value(words, is_named=True) else "?"


def is_word(letters: str) -> bool:
    """Whether letters are a word and no product of variables: with vowels, in lower case."""
    vowels = set("aeiou").intersection(letters)
    return bool(vowels) and letters[1:].islower() and len(set(letters)) > 2
