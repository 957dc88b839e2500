"""The lists of words that may stand beside a value (words.txt), and the words that change it."""

from __future__ import annotations

import re
from pathlib import Path

from gapo_megatron.rewards.math.functions import NAMES

_SECTION = re.compile(r"^\[(\w+)\].*\n([^\[]*)", re.MULTILINE)
WORDS = {
    name: frozenset(words.split())
    for name, words in _SECTION.findall(Path(__file__).with_name("words.txt").read_text("utf-8"))
}
"""The lists of words.txt."""
_FUNCTIONS = frozenset(NAMES.split("|"))

CHANGES_VALUE = re.compile(rf"\b(?:{'|'.join(WORDS['changes'])})\b", re.IGNORECASE)
"""Words that change a value, as in 3 eighths: with them a verdict is wrong, not unknown."""


def plural(noun: str) -> str:
    """The regular plural; the lists have the irregular ones."""
    if re.search(r"[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if re.search(r"(?:[sxz]|[cs]h)$", noun) else f"{noun}s"


def is_noun(word: str) -> bool:
    """Whether the list has the word or its plural; `logs` may be wood, but `log` is a function."""
    return word in WORDS["nouns"] or (word not in _FUNCTIONS and plural(word) in WORDS["nouns"])
