"""TOML files as trees: one file over another, single values over both; and back to TOML."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel


def read_tree(path: Path, *, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a TOML file over the one that its `base` names.

    Args:
        path: of the file; `base` is relative to its folder.
        seen: files that led here.

    Raises:
        ConfigError: names the file and what is wrong with it.
    """
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `base` goes round in a circle")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base ({base!r}) must be the path of another TOML file")
    return _merge(read_tree(path.parent / base, seen=(*seen, path.resolve())), tree)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one value of `tree`; what is no TOML value is a string.

    Raises:
        ConfigError: not of the form section.key=value.
    """
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.partition(".")
    if not (equals and dot and section and key) or "." in key:
        raise ConfigError(f"override {override!r} must have the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: objective.method=gapo
    node = tree.setdefault(section, {})
    if not isinstance(node, dict):
        raise ConfigError(f"override {override!r}: {section} is not a section")
    node[key] = value


def to_toml(config: BaseModel) -> str:
    """A resolved config as TOML that loads again to an equal config (None is left out)."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="python", exclude_none=True).items():
        lines.append(f"[{section}]")
        # JSON's strings, numbers and booleans are TOML's.
        lines += [
            f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
        ]
        lines.append("")
    return "\n".join(lines)
