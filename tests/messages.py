"""What a message must name, whatever its wording."""

from __future__ import annotations

import re


def mentions(*parts: object) -> str:
    """A regular expression for `match=`: every part as it is written, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(str(part))})" for part in parts)
