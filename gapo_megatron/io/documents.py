"""JSON and TOML that somebody else wrote: read whole, or refused by name. Standard library alone.

What the parsers leave to their callers is an error here too: a FIFO or a device in place of a file,
bytes that are no UTF-8, nesting or a size that no such file has, numbers that Python does not read,
a key that is given twice, NaN and Infinity, and half of a surrogate pair, which cannot be written
again.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gapo_megatron.errors import ConfigError, GapoError

MAX_BYTES = 2**28
"""Of one document: some ten times the largest tokenizer.json there is."""
MAX_DEPTH = 64
"""Lists and objects inside each other."""
MAX_BITS = 1024
"""Of a whole number in TOML, where hexadecimal ones may have more digits than Python writes again.
JSON's have at most the 4,300 digits that Python reads, and fewer where the document is walked."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading bytes; never waits, as the open of a FIFO would.

    Raises:
        OSError: it cannot be opened, or is something else than a file; `strerror` says what.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # of the path: a NUL in it
        raise OSError(errno.EINVAL, "its name has a NUL", str(path)) from None
    except NotADirectoryError:  # on the way: then it is not there either
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
    """A file's text.

    Args:
        path: of the file, in UTF-8.
        error: to raise.
        max_bytes: that it may have.

    Raises:
        FileNotFoundError: there is no such file; some callers go on without.
        GapoError: of class `error`: names the file, and what is wrong with it.
    """
    try:
        with open_file(path) as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    if len(content) > max_bytes:
        raise error(f"{path} has more than the {max_bytes} bytes that such a file may have")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not valid UTF-8: {problem.reason}") from None


def read_json(
    path: str | Path, *, error: type[GapoError] = ConfigError, max_bytes: int = MAX_BYTES
) -> Any:
    """A file's JSON; arguments and errors as of `read_text`, and those of `parse_json`."""
    return parse_json(
        read_text(path, error=error, max_bytes=max_bytes), where=str(path), error=error
    )


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: see `read_json`; or it holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {content!a:.40}, not a table")
    return content


def parse_json(
    text: str | bytes, *, where: str, error: type[GapoError] = ConfigError, is_data: bool = False
) -> Any:
    """The value that JSON text stands for.

    Args:
        text: of one value; bytes are UTF-8.
        where: the text is from, e.g. `FILE:LINE`; every message begins with it.
        error: to raise.
        is_data: a row of a data set, which may hold whatever Python reads where nobody looks: NaN,
            Infinity, halves of surrogate pairs, deep lists, equal keys. All of that is left to who
            uses a value, but for equal keys of the row itself.

    Raises:
        GapoError: of class `error`: where, and what is wrong.
    """
    outermost: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal outermost
        outermost = pairs  # at last those of the row: it ends behind the objects in it
        return dict(pairs)

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        if is_data:
            value = json.loads(text, object_pairs_hook=keep)
            return _unique(outermost) if isinstance(value, dict) else value
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite
        )
    except UnicodeDecodeError as problem:
        raise error(f"{where} is not valid UTF-8: {problem.reason}") from None
    except ValueError as problem:  # the parser's, ours, and int's: a number of too many digits
        raise error(f"{where} is not valid JSON: {problem}") from None
    except RecursionError:
        raise error(f"{where} is nested too deep") from None
    # The walk is for the few that may need it.
    may_be_deep = text.count("[") + text.count("{") > MAX_DEPTH
    if may_be_deep or _ESCAPED_SURROGATE.search(text):
        _check_tree(value, where=where, error=error)
    return value


def read_toml(path: str | Path, *, error: type[GapoError] = ConfigError) -> dict[str, Any]:
    """A file's TOML; arguments and errors as of `read_text`, and those of `parse_toml`."""
    return parse_toml(read_text(path, error=error), where=str(path), error=error)


def parse_toml(text: str, *, where: str, error: type[GapoError] = ConfigError) -> dict[str, Any]:
    """The tables of TOML text; arguments and errors as of `parse_json`."""
    try:
        tree = tomllib.loads(text)
    except ValueError as problem:  # a TOMLDecodeError, or a number of too many digits
        raise error(f"{where} is not valid TOML: {problem}") from None
    except RecursionError:
        raise error(f"{where} is nested too deep") from None
    _check_tree(tree, where=where, error=error)
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; parsers differ in which of two equal keys they believe."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {ascii(twice)[:60]} is given twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:60]} is beyond the largest number")
    return value


def _check_tree(value: Any, *, where: str, error: type[GapoError]) -> None:
    """Refuse what is nested too deep and text that cannot be written; without recursion."""
    level, depth = [value], 0
    while level:
        # Lists and objects alone make it deeper.
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
                raise error(f"{where}: {ascii(one)[:60]} has half of a surrogate pair")
            elif isinstance(one, int) and one.bit_length() > MAX_BITS:
                raise error(f"{where} has a number of more than {MAX_BITS} bits")
        level = below


def keys_of(row: Mapping[str, Any]) -> str:
    """The keys of an object, for a message: what cannot be written is escaped."""
    return ", ".join(row).encode("utf-8", "backslashreplace").decode()[:500] or "none"


def is_unicode(text: str) -> bool:
    """Whether text can be written: no half of a surrogate pair stands alone in it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
