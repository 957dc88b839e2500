"""Read JSON and TOML from users and other programs, strictly. Standard library only.

Beyond the parsers' own errors, these are errors: a FIFO or a device in place of a file, invalid
UTF-8, excessive size or nesting, numbers that Python cannot read, duplicate keys, NaN and Infinity,
and unpaired surrogates, which cannot be written again.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gapo_megatron.errors import ConfigError, GapoError, shown

MAX_BYTES = 2**28
"""Largest document: some ten times the largest published tokenizer.json."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects."""
MAX_BITS = 1024
"""Largest integer in TOML, whose hexadecimal ones could have more digits than Python prints."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading bytes, without blocking on a FIFO.

    Raises:
        OSError: it cannot be opened, or is not a regular file; `strerror` says why.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # of the path: a NUL in it
        raise OSError(errno.EINVAL, "its name has a NUL", str(path)) from None
    except NotADirectoryError:  # a parent is a file, so the path does not exist
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(
    path: str | Path, *, error: type[GapoError] = ConfigError, max_bytes: int = MAX_BYTES
) -> str:
    """Read a UTF-8 file.

    Args:
        path: the file.
        error: class of errors to raise.
        max_bytes: largest size.

    Raises:
        FileNotFoundError: the file does not exist; some callers do without.
        GapoError: of class `error`; names the file and the problem.
    """
    try:
        with open_file(path) as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    if len(content) > max_bytes:
        raise error(f"{path} is larger than the limit of {max_bytes} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not valid UTF-8: {problem.reason}") from None


def read_json(
    path: str | Path, *, error: type[GapoError] = ConfigError, max_bytes: int = MAX_BYTES
) -> Any:
    """Read a JSON file; for arguments and errors see `read_text` and `parse_json`."""
    return parse_json(
        read_text(path, error=error, max_bytes=max_bytes), where=str(path), error=error
    )


def read_object(path: Path, *, error: type[GapoError] = ConfigError) -> dict[str, Any]:
    """Read a file with a JSON object.

    Raises:
        FileNotFoundError: the file does not exist.
        GapoError: of class `error`, see `read_json`; or the file holds something else.
    """
    content = read_json(path, error=error)
    if not isinstance(content, dict):
        raise error(f"{path} holds {content!a:.40}, not a table")
    return content


def sendable(value: Any) -> Any:
    """What JSON can hold of a value: halves of characters become ?, NaN and infinities null."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return json.loads(text, parse_constant=lambda name: None)


def parse_json(
    text: str | bytes, *, where: str, error: type[GapoError] = ConfigError, is_data: bool = False
) -> Any:
    """Parse JSON text.

    Args:
        text: one value; bytes are UTF-8.
        where: source of the text, e.g. `FILE:LINE`; every message begins with it.
        error: class of errors to raise.
        is_data: the text is a row of a data set. NaN, Infinity, unpaired surrogates and deep
            nesting are then accepted; only duplicate top-level keys are rejected.

    Raises:
        GapoError: of class `error`; names source and problem.
    """
    outermost: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal outermost
        outermost = pairs  # the last call is for the outermost object
        return dict(pairs)

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        if is_data:
            value = json.loads(text, object_pairs_hook=keep)
            return _unique(outermost) if isinstance(value, dict) else value
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_whole,
        )
    except UnicodeDecodeError as problem:
        raise error(f"{where} is not valid UTF-8: {problem.reason}") from None
    except ValueError as problem:  # of the parser, of ours, or of int: too many digits
        raise error(f"{where} is not valid JSON: {problem}") from None
    except RecursionError:
        raise error(f"{where} is nested too deep") from None
    # Walking the tree is slow, and few documents need it.
    may_be_deep = text.count("[") + text.count("{") > MAX_DEPTH
    if may_be_deep or _ESCAPED_SURROGATE.search(text):
        _check_tree(value, where=where, error=error)
    return value


def read_toml(path: str | Path, *, error: type[GapoError] = ConfigError) -> dict[str, Any]:
    """Read a TOML file; for arguments and errors see `read_text` and `parse_toml`."""
    text = read_text(path, error=error).removeprefix("\ufeff")  # Windows editors write it
    return parse_toml(text, where=str(path), error=error)


def parse_toml(text: str, *, where: str, error: type[GapoError] = ConfigError) -> dict[str, Any]:
    """Parse TOML text; for arguments and errors see `parse_json`."""
    try:
        tree = tomllib.loads(text)
    except ValueError as problem:  # TOMLDecodeError, or a number with too many digits
        raise error(f"{where} is not valid TOML: {problem}") from None
    except RecursionError:
        raise error(f"{where} is nested too deep") from None
    _check_tree(tree, where=where, error=error)
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object without duplicate keys, of which parsers use the first or the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {ascii(twice)[:60]} is given twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:60]} is beyond the largest number")
    return value


def _whole(digits: str) -> int:
    _finite(digits)  # what should be any number may be written without a point
    return int(digits)


def _check_tree(value: Any, *, where: str, error: type[GapoError]) -> None:
    """Refuse deep nesting, unpaired surrogates and huge numbers; without recursion."""
    level, depth = [value], 0
    while level:
        # Only lists and objects count as levels.
        depth += any(isinstance(one, dict | list) for one in level)
        if depth > MAX_DEPTH:
            raise error(f"{where} is nested deeper than {MAX_DEPTH} levels")
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str) and not is_unicode(one):
                raise error(f"{where}: {ascii(one)[:60]} has an unpaired surrogate")
            elif isinstance(one, int) and one.bit_length() > MAX_BITS:
                raise error(f"{where} has a number of more than {MAX_BITS} bits")
        level = below


def keys_of(row: Mapping[str, Any]) -> str:
    """The keys of an object, for a message; surrogates are escaped."""
    return ", ".join(row).encode("utf-8", "backslashreplace").decode()[:500] or "none"


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], within: str = ""
) -> Iterator[str]:
    """Texts that name each value that differs, `within` a table of this name, and both values."""
    for key in sorted(before.keys() | now.keys()):
        was, is_now = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(is_now, dict):
            yield from differences(was, is_now, f"{within}{key}.")
        elif was != is_now:
            yield f"{within}{key} was {shown(was)}, is {shown(is_now)}"


def is_unicode(text: str) -> bool:
    """Whether text can be encoded: it has no unpaired surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
