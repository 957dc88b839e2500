"""Errors of a config as messages for users."""

from __future__ import annotations

import difflib
import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from gapo_megatron.errors import shown

_WORD = re.compile(r"[\w-]{1,80}")


def explain(item: Any, model: type[BaseModel]) -> str:
    """Describe one error of a config: the field, its value, and the rule or the nearest key.

    Args:
        item: one error of a pydantic `ValidationError`.
        model: the pydantic model that was validated.
    """
    where = place(item["loc"]) or "config"
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, item["loc"][:-1])
        key = str(item["loc"][-1])[:80]
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        is_close = bool(difflib.get_close_matches(key, known, n=1, cutoff=0.8))
        if len(item["loc"]) == 2 and not is_close:  # perhaps a key of another section
            sections = [one for one in model.model_fields if key in _fields_at(model, (one,))]
            near = [f"{one}.{key}" for one in sections[:1]] or near
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{where}: required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    for limit in item.get("ctx", {}).values():
        if isinstance(limit, float):  # pydantic writes up to 300 digits
            message = f"{message.rpartition(' ')[0]} {limit:g}"
    value = item["input"]
    is_section = len(item["loc"]) < 2 and isinstance(value, dict | BaseModel)
    given = "" if is_section else f" ({shown(value)})"
    return f"{where}{given}: {message}"


def place(loc: tuple[int | str, ...]) -> str:
    """Join to `section.key`; a malformed key is quoted as in Python."""
    return ".".join(str(part) if _WORD.fullmatch(str(part)) else shown(part) for part in loc)


def _fields_at(model: Any, path: tuple[Any, ...]) -> list[str]:
    for part in path:
        if isinstance(part, int):  # a table of a list
            continue
        if get_origin(model) is dict:
            model = get_args(model)[1]
        else:
            model = model.model_fields[str(part)].annotation
        # An optional section is `Section | None`, a list of tables `tuple[Section, ...]`.
        while get_origin(model) not in (None, dict):
            model = get_args(model)[0]
    return list(model.model_fields)
