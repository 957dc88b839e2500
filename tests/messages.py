"""What a message must name, whatever its wording."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def mentions(*parts: object) -> str:
    """A regular expression for `match=`: every part as it is written, in any order.

    A number is one of its own: no digits of another number, of a word or of a path.
    """
    return "(?s)" + "".join(f"(?=.*{_part(str(part))})" for part in parts)


def _part(text: str) -> str:
    if _NUMBER.fullmatch(text):
        return rf"(?<![\w./-]){re.escape(text)}(?!\w|\.\d)"
    return re.escape(text)
