"""Reads rows of JSONL, JSON and Parquet files, one at a time."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.documents import MAX_BYTES, is_unicode, keys_of, open_file, parse_json

Row = dict[str, Any]

MAX_ROW_BYTES = MAX_BYTES
"""Largest row of JSON: a row may hold 100 MB of tests."""
CHUNK = 2**20
"""Characters of a JSON list that are read at a time."""
PARQUET_ROWS = 16
"""Rows of a Parquet file that are converted at a time: a row may hold 100 MB of tests."""


def check_format(path: Path) -> None:
    """Refuse a file that `read_rows` cannot read, by its suffix and type.

    Raises:
        ConfigError: unknown suffix.
        DataError: it cannot be opened, or is not a file.
    """
    if path.suffix not in _READERS:
        raise ConfigError(f"input {path} must be a file *{', *'.join(_READERS)}")
    with _opened(path):
        pass


def read_rows(
    path: Path, *, columns: Sequence[str] = (), optional: Sequence[str] = (), after: int = 0
) -> Iterator[tuple[int, Row, float]]:
    """Read a file's rows in order, with a few of them in memory (of Parquet, up to a row group).

    Args:
        path: .jsonl, .json (one list) or .parquet.
        columns: columns to read from a Parquet file, which must have them; other formats give all.
        optional: columns to read from a Parquet file if it has them.
        after: number of the last row to skip.

    Yields:
        Line number (JSONL) or row number (others), from 1; the row; and roughly the share of the
        file that has been read.

    Raises:
        DataError: the file cannot be read, lacks a column, or a row is not an object; names file
            and row.
    """
    with _opened(path) as file:
        for number, row, share in _READERS[path.suffix](file, path, columns, optional, after):
            if number <= after:
                continue
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: must be an object, not {type(row).__name__}")
            yield number, row, share


def read_problem_rows(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, Row]]:
    """Read a problem file: .parquet, .json, or JSON lines in a file with any other suffix.

    Args:
        path: the file. A `.json` file may hold one list, or JSON lines.
        columns: columns to read from a Parquet file if it has them; None: all.

    Yields:
        Line number (JSON lines) or row number (others), from 1, and the row.

    Raises:
        DataError: as `read_rows`.
    """
    with _opened(path) as file:
        reader = _READERS.get(path.suffix, _jsonl)
        if reader is _json and _first_character(file) == b"{":
            reader = _jsonl
        for number, row, _ in reader(file, path, (), columns, 0):
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: must be an object, not {reprlib.repr(row)}")
            yield number, row


def count_rows(path: Path) -> int:
    """Number of rows of a problem file, without reading the rows of a Parquet file.

    Raises:
        DataError: as `read_rows`.
    """
    if path.suffix == ".parquet":
        with _opened(path) as file, _parquet_file(file, path) as parquet_file:
            return int(parquet_file.metadata.num_rows)
    if path.suffix == ".json":
        return sum(1 for _ in read_problem_rows(path, ()))
    with _opened(path) as file:
        return sum(1 for _, line in _lines(file, path) if line.strip())


def column_names(path: Path, row: Row) -> str:
    """Keys of a row, for a message; of a Parquet file all columns, also those not read."""
    if path.suffix != ".parquet":
        return keys_of(row)
    with _opened(path) as file, _parquet_file(file, path) as parquet_file:
        return ", ".join(parquet_file.schema_arrow.names)


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Read the JSON of each line that is not blank; the file may have any suffix.

    Yields:
        Line number, from 1, and the value.

    Raises:
        DataError: the file cannot be read, or a line is not JSON; names file and line.
    """
    with _opened(path) as file:
        for number, value, _ in _jsonl(file, path, (), (), 0):
            yield number, value


def check_texts(row: Any, keys: Sequence[str], optional: Sequence[str], *, where: str) -> None:
    """Check that the values of `keys`, and of those `optional` keys that there are, are texts.

    Args:
        row: a row as read.
        keys: required keys, whose values are not empty.
        optional: further keys.
        where: file and row, for messages.

    Raises:
        DataError: names row, key and rule.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be a JSON object, not {reprlib.repr(row)}")
    for key in keys:
        if key not in row:
            raise DataError(f"{where}: key {key!r} is missing; the row has {keys_of(row)}")
    for key in (*keys, *(key for key in optional if key in row)):
        if not isinstance(row[key], str):
            raise DataError(f"{where}: {key} ({reprlib.repr(row[key])}) must be a string")
        if not is_unicode(row[key]):
            raise DataError(f"{where}: {key} ({reprlib.repr(row[key])}) contains a lone surrogate")
        if key in keys and not row[key].strip():
            raise DataError(f"{where}: {key} is empty")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {error.reason}") from None


def _parse(text: str | bytes, path: Path, number: int) -> Any:
    return parse_json(text, where=f"{path}:{number}: the row", error=DataError, is_data=True)


def _first_character(file: BinaryIO) -> bytes:
    """The first byte that is not white space; the file is then at its start again."""
    start = file.read(CHUNK).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return start[:1]


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1."""
    lines = iter(lambda: file.readline(MAX_ROW_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_ROW_BYTES:
            raise DataError(f"{path}:{number}: a row of more than {MAX_ROW_BYTES} bytes")
        yield number, line


def _jsonl(
    file: BinaryIO,
    path: Path,
    columns: Sequence[str],
    optional: Sequence[str] | None,
    after: int,
) -> Iterator[tuple[int, Any, float]]:
    size, done = os.fstat(file.fileno()).st_size, 0
    for number, line in _lines(file, path):
        done += len(line)
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # files from Windows
        if number > after and line.strip():
            yield number, _parse(line, path, number), done / size


def _json(
    data: BinaryIO,
    path: Path,
    columns: Sequence[str],
    optional: Sequence[str] | None,
    after: int,
) -> Iterator[tuple[int, Any, float]]:
    size = os.fstat(data.fileno()).st_size
    text = _JsonText(io.TextIOWrapper(data, encoding="utf-8-sig"), path)
    if text.take() != "[":
        raise DataError(f"{path}: must hold a JSON list")
    number, separator = 0, text.take() if text.look() == "]" else ","
    while separator == ",":
        number += 1
        yield number, _parse(text.take_value(), path, number), data.tell() / size
        separator = text.take()
        if separator not in (",", "]"):
            raise DataError(f"{path}: no ',' or ']' after row {number}")
    if text.look():
        raise DataError(f"{path}: text after the end of the list")


class _JsonText:
    """A JSON file that is read value by value, with only the current one in memory."""

    _NOT_SPACE = re.compile(r"[^ \t\r\n]")

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path = file, path
        self._text = ""
        self._position = 0
        self._decode = json.JSONDecoder().raw_decode

    def look(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            if found := self._NOT_SPACE.search(self._text, self._position):
                self._position = found.start()
                return found[0]
            self._position = len(self._text)
            if not self._grow():
                return ""

    def take(self) -> str:
        character = self.look()
        self._position += len(character)
        return character

    def take_value(self) -> str:
        """Text of the next value; all remaining text if it is malformed.

        Only its end is used here. The caller parses the text again, with the checks of all formats.
        """
        self.look()
        while True:
            try:
                _, end = self._decode(self._text, self._position)
                break
            except json.JSONDecodeError:  # perhaps incomplete
                if self._grow():
                    continue
            except (ValueError, RecursionError):  # too long a number, or nested too deeply
                pass
            end = len(self._text)
            break
        value, self._position = self._text[self._position : end], end
        return value

    def _grow(self) -> bool:
        more = self._file.read(max(CHUNK, len(self._text)))
        self._text, self._position = self._text[self._position :] + more, 0
        if len(self._text) > 2 * MAX_ROW_BYTES:  # half of it may be read ahead
            raise DataError(f"{self._path}: a row of more than {MAX_ROW_BYTES} characters")
        return bool(more)


def _parquet(
    data: BinaryIO,
    path: Path,
    columns: Sequence[str],
    optional: Sequence[str] | None,
    after: int,
) -> Iterator[tuple[int, Any, float]]:
    """Rows with `columns`, which the file must have, and `optional`; None: all others."""
    with _parquet_file(data, path) as file:
        names = file.schema_arrow.names
        if absent := [name for name in columns if name not in names]:
            raise DataError(
                f"{path}: has no column {' nor '.join(absent)}; it has {', '.join(names)} "
                "(for other names set --prompt-key and --answer-key)"
            )
        there = [name for name in (*columns, *(optional or ())) if name in names]
        groups, passed = list(range(file.num_row_groups)), 0
        while groups and passed + file.metadata.row_group(groups[0]).num_rows <= after:
            passed += file.metadata.row_group(groups.pop(0)).num_rows
        batches = file.iter_batches(
            PARQUET_ROWS,
            row_groups=groups,
            columns=names if optional is None else there,
            use_threads=False,
        )
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=passed + 1):
            yield number, row, number / file.metadata.num_rows


@contextmanager
def _parquet_file(data: BinaryIO, path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(data, buffer_size=CHUNK, pre_buffer=False) as file:
            yield file
    except ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
