"""Config files in TOML: a file over its `base`, single overrides over both; and writing TOML."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.io.documents import parse_toml, read_toml

if TYPE_CHECKING:
    from pydantic import BaseModel

_NAME = re.compile(r"([\w-]+)\.([\w-]+)")
_MOST_BASES = 16
"""Longest chain of `base` files."""


def read_tree(path: Path, *, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a TOML file, merged over the file that its `base` names.

    Args:
        path: the file; `base` is relative to its folder.
        seen: files whose `base` led here.

    Raises:
        ConfigError: names the file and the problem.
    """
    try:
        tree = read_toml(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from None
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base ({shown(base)}) must be the path of another TOML file")
    here = os.path.realpath(path)
    if here in seen:
        raise ConfigError(f"{path}: `base` files form a circle")
    if len(seen) == _MOST_BASES:
        raise ConfigError(
            f"{path}: base ({base!r}): more than {_MOST_BASES} files in a chain of `base`"
        )
    return _merge(read_tree(path.parent / base, seen=(*seen, here)), tree)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one value of `tree` by `section.key=value`; a value that is not TOML is a string.

    Raises:
        ConfigError: the override has another form.
    """
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {shown(override)} must have the form section.key=value")
    set_value(tree, name, _value(text))


def set_value(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set one value of `tree` by its name, `section.key`.

    Raises:
        ConfigError: the name has another form, or the section is a value.
    """
    parts = _NAME.fullmatch(name)
    if not parts:
        raise ConfigError(
            f"override {shown(f'{name}={value}')} must have the form section.key=value"
        )
    node = tree.setdefault(parts[1], {})
    if not isinstance(node, dict):
        raise ConfigError(f"override {shown(f'{name}={value}')}: {parts[1]} is not a section")
    node[parts[2]] = value


def _value(text: str) -> Any:
    try:
        tree = parse_toml(f"value = {text}", where="override")
    except ConfigError:
        return text  # a bare word is a string: objective.method=gapo
    # A second line would set another key.
    return tree["value"] if len(tree) == 1 else text


def to_toml(config: BaseModel, *, without_defaults: bool = False) -> str:
    """Write a resolved config as TOML that loads to an equal config.

    Args:
        config: its sections.
        without_defaults: leave out what equals its default; None is always left out.
    """
    sections = config.model_dump(
        mode="python", exclude_none=True, exclude_defaults=without_defaults
    )
    return sections_to_toml({name: values for name, values in sections.items() if values})


def sections_to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Write tables of strings, numbers, booleans, and lists and tables of them, as TOML.

    Strings and numbers are written as JSON, which TOML reads but for one character; no number is
    NaN.
    """
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_inline(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(key)} = {_inline(one)}" for key, one in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
