"""What is wrong with a config, in words."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel


def explain(item: Any, model: type[BaseModel]) -> str:
    """A line about one fault of a config: the field, its value, and the rule or the nearest key.

    Args:
        item: of a pydantic `ValidationError`.
        model: that was to be.
    """
    where = ".".join(str(part) for part in item["loc"]) or "config"
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{where}: required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    value = item["input"]
    shown = "" if isinstance(value, dict | BaseModel) else f" ({value!r})"
    return f"{where}{shown}: {message}"


def _fields_at(model: Any, path: tuple[Any, ...]) -> list[str]:
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        # An optional section is `Section | None`.
        model = (get_args(annotation) or (annotation,))[0]
    return list(model.model_fields)
