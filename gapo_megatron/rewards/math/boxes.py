r"""Finds boxes (`\boxed`) and matching brackets."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
# Not the next word: \boxed may only be spoken of.
_BARE = re.compile(r"(?![a-zA-Z]{2}|[^\w\s∞]+(?:[\s\\{]|$))[^\s$\\{}]+")
_JOINT = re.compile(
    r"(?:[\s,;$&{}]|\\(?:text|q?quad)(?![a-zA-Z])|\\[^a-zA-Z]|(?:and|or)(?![a-zA-Z])"
    r"|[^\s,;$={}]{1,8}\s*=)*+"  # a name
)
_NEW_SENTENCE = re.compile(r"[.!?:][\s$}\])]*\s|\n|\b(?:answer|hence|so|then|therefore|thus)\b")
_BRACKET = re.compile(r"\\.|[(){}\[\]]", re.DOTALL)
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def boxes(text: str) -> list[str | None]:
    r"""Contents of all outermost boxes (`\boxed{5}`, `\fbox{5}`, `\boxed 5`); None if unclosed."""
    return [content for _, _, content in _find(text)]


def last_boxes(text: str) -> list[str | None]:
    """The last box, and those before it from which only separators and names divide it.

    Raises:
        ValueError: others are in the same sentence, so that they may be parts of the answer.
    """
    found = _find(text)
    first = max(len(found) - 1, 0)
    while first and _JOINT.fullmatch(text, found[first - 1][1], found[first][0]):
        first -= 1
    between = text[found[first - 1][1] : found[first][0]] if first else "\n"
    if not _NEW_SENTENCE.search(between):
        raise ValueError(
            f"the reference answer {text[:100]!r} has {between!r} between two boxes, which may be "
            "parts of one answer: put all of it into one box"
        )
    return [content for _, _, content in found[first:]]


def _find(text: str) -> list[tuple[int, int, str | None]]:
    """Start, end and content of all outermost boxes."""
    found: list[tuple[int, int, str | None]] = []
    end = 0
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue  # nested in the previous box
        if not text.startswith("{", box.end()):
            if bare := _BARE.match(text, box.end()):
                found.append((box.start(), bare.end(), bare[0]))
            continue
        end = closing_bracket(text, box.end())
        found.append((box.start(), end, text[box.end() + 1 : end - 1] if end else None))
        if not end:
            break
    return found


def closing_bracket(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`; 0 if it is never closed."""
    opening, depth = text[start], 0
    for token in _BRACKET.finditer(text, start):
        depth += (token[0] == opening) - (token[0] == _CLOSING[opening])
        if depth == 0:
            return token.end()
    return 0


def without_boxes(text: str) -> str:
    """Replace boxes by their contents, so that text beside them counts."""
    return _BOX.sub(" ", text)
