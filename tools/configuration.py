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
from gapo_megatron.config.roles import is_held_out, is_input, role_of
from gapo_megatron.config.section import Section

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
MARK = "<!-- tools/configuration.py writes what follows -->\n"
UNLIMITED = 10**6
"""Limits from here on are not worth a reader's time."""
RECORDED = "Filled in when the config is loaded."
"""Ends the description of a setting that is not for users to give; it has no row."""


def document() -> str:
    """The document with new tables, one for each section."""
    by_hand, mark, _ = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    lines = [line for name in Config.sections() for line in _section(name)]
    return by_hand + mark + "\n" + "\n".join(lines).rstrip("\n") + "\n"


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
    yield "| setting | value | default | change | meaning |"
    yield "|---|---|---|---|---|"
    schema = model.model_json_schema()
    for key, field in schema["properties"].items():
        if field["description"].endswith(RECORDED):
            continue
        setting = f"{name}.{key}"
        is_required = key in schema.get("required", ())
        default = "required" if is_required else _value(field.get("default", {}))
        meaning = _linked(" ".join(field["description"].split()))
        columns = (f"`{key}`", _values(field, setting), default, _change(setting), meaning)
        yield f"| {' | '.join(columns)} |"
    yield ""


def _values(field: dict[str, Any], setting: str) -> str:
    """Type and range of a setting, from its JSON schema."""
    choices = [one for one in field.get("anyOf", ()) if one["type"] != "null"]
    if choices:
        return " or ".join(_values(one, setting) for one in choices)
    if "const" in field:
        return _value(field["const"])
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


def _change(setting: str) -> str:
    """When the setting may change: the words of the table above the generated part."""
    role = role_of(setting)
    if role.fixed:
        return "no"
    star = "\\*" if role.picks_groups else ""
    if role.resume or (is_input(setting) and is_held_out(setting)):
        return "yes" + star
    if role.study:
        return "logged" + star
    if is_input(setting):
        return "same content"
    return "branch" if role.branch else "if allowed"


def _linked(text: str) -> str:
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text).replace("|", "\\|")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    DOCUMENT.write_text(document(), encoding="utf-8")
