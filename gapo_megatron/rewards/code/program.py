"""The program in a response."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gapo_megatron.rewards.response import final_part

_OPENING = re.compile(r"[ \t]*```+[ \t]*([\w+-]*)")
_CLOSING = re.compile(r"[ \t]*```+[ \t]*")
_PYTHON = ("python", "python3", "py", "Python")


def extract_program(response: str) -> str | None:
    """Return the last fenced block of the final part, those marked as Python before others.

    A block must be closed: a response cut off inside it holds no program.
    """
    blocks = list(_blocks(final_part(response)))
    marked = [text for language, text in blocks if language in _PYTHON]
    plain = [text for language, text in blocks if not language]
    for texts in (marked, plain):
        if texts:
            return texts[-1]
    return None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The mark and the text of every block that is closed. Line by line: it takes linear time."""
    language, lines = None, list[str]()
    for line in text.split("\n"):
        if language is None:
            opening = _OPENING.match(line)
            language = opening and opening[1]
        elif _CLOSING.fullmatch(line):
            yield language, "".join(f"{line}\n" for line in lines)
            language, lines = None, []
        else:
            lines.append(line)
