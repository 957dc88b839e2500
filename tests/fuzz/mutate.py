"""Ways to damage a file, and documents that are well-formed but wrong."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

WORD = r"[A-Za-z]+(?:_[A-Za-z0-9]+)*"


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that stands in a document as it is, whatever the format says of it."""

    text: str


@dataclass(frozen=True, slots=True)
class Damage:
    """What was done to a copy of an input."""

    file: str
    """Relative to the input's folder."""
    what: str
    settings: tuple[str, ...] = ()
    """Names of settings of which an error may speak in place of the file."""
    signed: bool = False
    """Its digests are right: whoever does that may put in any weights, but not run code."""


_TEXTS = [
    *("", "a", "0", "true", "None", "nan", "..", "/", "../../x", "~", "a/b", "é", "😀", "'", "a b"),
    *("$(id)", ";", "#SBATCH -N 9", "=", "[x]", "{0}", "%s", " ", "a\nb", "a\tb", "\r", "a\0b"),
    *("\x1b[2J", "\u2028", "\ufeff", '"', "\\", "x" * 300, "x" * 5000),
]
_RAW = [
    *("1e999", "NaN", "-Infinity", "inf", "9" * 5000, "9" * 400, "0x10", "01", '"\\ud800"'),
    *("[" * 80 + "]" * 80, "[" * 3000 + "]" * 3000, '{"a": 1, "a": 2}', "1 2", ""),
]
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], {"": {}}, [1, "a"], {"a": 1}),
    *(0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(10**40, 0.0, -0.0, 0.5, 1e-320, -1e308, 1e308, 1.0000000001),
    *_TEXTS,
    *map(Raw, _RAW),
)


def hostile(rng: Random, value: Any = None) -> Any:
    """Another value in place of one: near it, of its type, or any."""
    kind = rng.randrange(4)
    if kind == 0 and isinstance(value, bool):
        return not value
    if kind == 0 and isinstance(value, int):
        return value + rng.choice((-1, 1, value, -2 * value, 10**6))
    if kind == 0 and isinstance(value, float):
        return rng.choice((-value, value * 1e300, value / 1e300, value + 1, int(value)))
    if kind == 0 and isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(("", "\0", "\n", "é", value, "/", " ")) + value[at + 1 :]
    if kind == 0 and isinstance(value, list) and value:
        return rng.choice((value[:-1], value + value, [value], value[::-1], [*value, None]))
    alike = [one for one in HOSTILE if type(one) is type(value)]
    return rng.choice(alike if kind < 3 and alike else HOSTILE)


# --- bytes ---------------------------------------------------------------------------------------


def damage_bytes(rng: Random, content: bytes) -> tuple[bytes, str]:
    """Flip, cut, repeat, insert, zero or swap; never equal to `content`."""
    while True:
        start = rng.randrange(len(content) + 1)
        # Heads, where formats keep their lengths, as often as everything else.
        start = min(start, rng.choice((8, 64, 512, len(content))))
        length = min(rng.choice((1, 2, 8, 64, 4096)), len(content) - start)
        end = start + length
        kind, changed = rng.choice(
            (
                ("flip a bit", _flip(rng, content)),
                ("cut off", content[:start]),
                ("leave out", content[:start] + content[end:]),
                ("repeat", content[:end] + content[start:]),
                ("insert", content[:start] + rng.randbytes(length) + content[start:]),
                ("overwrite", content[:start] + rng.randbytes(length) + content[end:]),
                ("zero", content[:start] + bytes(length) + content[end:]),
                ("append", content + rng.choice((b"\n", b"\0", b"{}", b"x", content))),
                ("empty", b""),
                ("begin late", content[start:]),
            )
        )
        if changed != content:
            return changed, f"{kind} at {start}, {length} of {len(content)} bytes"


def _flip(rng: Random, content: bytes) -> bytes:
    if not content:
        return b"\1"
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


# --- files ---------------------------------------------------------------------------------------


def damage_file(rng: Random, folder: Path, file: str) -> Damage:
    """Something else where a file was, or its bytes damaged."""
    path = folder / file
    if rng.random() < 0.4:
        changed, what = damage_bytes(rng, path.read_bytes())
        path.write_bytes(changed)
        return Damage(file, what)
    path.unlink()
    kinds: dict[str, Callable[[], object]] = {
        "gone": lambda: None,
        "folder": path.mkdir,
        "FIFO": lambda: os.mkfifo(path),
        "dangling": lambda: path.symlink_to("/nowhere/at/all"),
        "loop": lambda: path.symlink_to(path),
        "device": lambda: path.symlink_to("/dev/null"),
    }
    what = rng.choice([*kinds])
    kinds[what]()
    return Damage(file, what)


# --- JSON ----------------------------------------------------------------------------------------


def damage_json(rng: Random, folder: Path, file: str) -> Damage:
    """Well-formed JSON, mostly, that says something else."""
    path = folder / file
    document = json.loads(path.read_text(encoding="utf-8"))
    changed, what = damage_tree(rng, document)
    path.write_text(json_text(changed), encoding="utf-8", errors="surrogatepass")
    return Damage(file, what, tuple(re.findall(r"[a-z]+(?:_[a-z]+)+", what)))


def damage_tree(rng: Random, tree: Any) -> tuple[Any, str]:
    """A copy of a document in which one place, or a few, differ."""
    what = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        tree, how = _damage_once(rng, tree)
        what.append(how)
    return tree, "; ".join(what)


def _damage_once(rng: Random, tree: Any) -> tuple[Any, str]:
    paths = list(_paths(tree))
    at = rng.choice(paths)
    shown = "/".join(map(str, at)) or "(all of it)"
    root = [_copy(tree)]
    parent: Any = root
    key: Any = 0
    for part in at:
        parent, key = parent[key], part
    value = parent[key]
    kind = rng.randrange(8)
    if kind == 0 and isinstance(parent, dict):
        del parent[key]
        return root[0], f"{shown} left out"
    if kind == 1 and isinstance(parent, dict):
        parent[_near_key(rng, str(key))] = parent.pop(key)
        return root[0], f"{shown} renamed"
    if kind == 2 and isinstance(parent, dict):
        parent[_near_key(rng, str(key))] = hostile(rng, value)
        return root[0], f"a key beside {shown}"
    if kind == 3 and len(paths) > 2:
        other: Any = tree
        for part in rng.choice(paths[1:]):
            other = other[part]
        parent[key] = _copy(other)
        return root[0], f"{shown} like another place"
    if kind == 4 and isinstance(value, list) and value:
        parent[key] = rng.choice((value[1:], value + value[:1], value[::-1]))
        return root[0], f"{shown}'s elements"
    parent[key] = new = hostile(rng, value)
    return root[0], f"{shown} = {str(new)[:60]!r}"


def _paths(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        found += _paths(value, (*at, key))
    return found


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


def _near_key(rng: Random, key: str) -> str:
    return rng.choice(
        (key + "s", key[:-1], key.upper(), key + "\0", " " + key, key.replace("_", "-"), "x")
    )


def json_text(tree: Any) -> str:
    """As JSON, but what is `Raw` as it is."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {json_text(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(json_text, tree)) + "]"
    return json.dumps(tree)


# --- TOML ----------------------------------------------------------------------------------------


def damage_toml(rng: Random, folder: Path, file: str) -> Damage:
    """A TOML file in which one place, or a few, differ."""
    path = folder / file
    tree, what = damage_tree(rng, tomllib.loads(path.read_text(encoding="utf-8")))
    lines = (
        [f"{key} = {toml_text(value)}\n" for key, value in tree.items()]
        if isinstance(tree, dict)
        else []
    )
    path.write_text("".join(lines), encoding="utf-8", errors="surrogatepass")
    return Damage(file, what, tuple(re.findall(WORD, what)))


def toml_text(value: Any) -> str:
    """As a TOML value, where it has one."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {toml_text(one)}' for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return json.dumps(value)  # its strings and numbers are TOML's; null is not
