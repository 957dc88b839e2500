r"""Finds boxes (`\boxed`) and matching brackets."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE = re.compile(r"[^\s$\\{}]+")
_BRACKET = re.compile(r"\\.|[(){}\[\]]", re.DOTALL)
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def boxes(text: str) -> list[str | None]:
    r"""Contents of all outermost boxes (`\boxed{5}`, `\fbox{5}`, `\boxed 5`); None if unclosed."""
    found: list[str | None] = []
    end = 0
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue  # nested in the previous box
        if not text.startswith("{", box.end()):
            if bare := _BARE.match(text, box.end()):
                found.append(bare[0])
            continue
        end = closing_bracket(text, box.end())
        found.append(text[box.end() + 1 : end - 1] if end else None)
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


def strip_box(text: str) -> str:
    """The content of the only box of `text`; `text` if it has none or several."""
    found = boxes(text)
    return found[-1] if len(found) == 1 and found[-1] is not None else text
