"""Write the tables of docs/configuration.md from the configuration's schema.

Run it after a change of a setting; the text above the tables is written by hand, and stays.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.config import Config
from gapo_megatron.config.methods import METHODS
from gapo_megatron.config.objective_section import METHOD_KEYS
from gapo_megatron.config.roles import is_held_out, is_input, role_of
from gapo_megatron.config.section import Section

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
MARK = "<!-- tools/configuration.py writes what follows -->\n"
UNLIMITED = 2**31
"""Limits from here on are those of integer types: not worth a reader's time."""


def document() -> str:
    """The document with new tables: one for each section, then the presets of the methods."""
    by_hand, mark, _ = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    lines = [line for name in Config.sections() for line in _section(name)]
    return by_hand + mark + "\n" + "\n".join([*lines, *_methods()]) + "\n"


def _section(name: str) -> Iterator[str]:
    model = Config.sections()[name]
    yield f"## `{name}`\n"
    yield from _table(name, model)
    for key, field in model.model_fields.items():
        for one in get_args(field.annotation):
            if isinstance(one, type) and issubclass(one, Section):
                yield f"### `[[{name}.{key}]]`\n"
                yield from _table(f"{name}.{key}", one)


def _table(name: str, model: type[Section]) -> Iterator[str]:
    yield _linked(" ".join((model.__doc__ or "").split())) + "\n"
    yield "| setting | value | default | resume | branch | meaning |"
    yield "|---|---|---|---|---|---|"
    schema = model.model_json_schema()
    for key, field in schema["properties"].items():
        setting = f"{name}.{key}"
        is_required = key in schema.get("required", ())
        default = "required" if is_required else _value(field.get("default", {}))
        meaning = _linked(" ".join(field["description"].split()))
        columns = (f"`{key}`", _values(field, setting), default, *_rules(setting), meaning)
        yield f"| {' | '.join(columns)} |"
    yield ""


def _values(field: dict[str, Any], setting: str) -> str:
    """Type and range of a setting, from its JSON schema."""
    field = next((one for one in field.get("anyOf", ()) if one["type"] != "null"), field)
    if "enum" in field:
        return ", ".join(map(_value, field["enum"]))
    if field["type"] == "array":
        return f"list of {field['items'].get('type', 'table')}s"
    if field["type"] == "object":
        return "table"
    names = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    given = {
        sign: field[name] for name, sign in names.items() if field.get(name, UNLIMITED) < UNLIMITED
    }
    limits = [
        f"{sign} {limit}" for sign, limit in given.items() if sign != ">" or ">=" not in given
    ]
    is_path = is_input(setting) or setting == "run.output_dir"
    return ", ".join(["path" if is_path else field["type"], *limits])


def _value(value: object) -> str:
    return "unset" if value is None else f"`{json.dumps(value)}`"


def _rules(setting: str) -> tuple[str, str]:
    """Whether a resume, and whether a branch, may change the setting."""
    role = role_of(setting)
    star = "\\*" if role.picks_groups else ""
    refused = "no" if role.fixed else "if allowed"
    resume = "yes" if role.resume else "logged" if role.study else refused
    if is_input(setting) and not (role.resume or role.study):
        resume = "yes" if is_held_out(setting) else "same content"
    return resume + star, ("yes" if role.branch else "no") + star


def _methods() -> Iterator[str]:
    keys = ("family", "ratio", *METHOD_KEYS, "has_floor")
    yield "### Presets of the methods\n"
    yield f"| `method` | {' | '.join(f'`{key}`' for key in keys)} |"
    yield "|---" * (len(keys) + 1) + "|"
    for name, method in METHODS.items():
        values = [getattr(method, key) for key in keys[:-1]]
        values.append(method.has_floor if method.adaptive else None)
        words = {None: "-", True: "yes", False: "no"}
        shown = [f"{one:.4g}" if type(one) is float else words.get(one, one) for one in values]
        yield f"| `{name}` | {' | '.join(shown)} |"


def _linked(text: str) -> str:
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text).replace("|", "\\|")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    DOCUMENT.write_text(document(), encoding="utf-8")
