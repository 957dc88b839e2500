"""Rows of JSONL, JSON and Parquet files, one at a time."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from gapo_megatron.errors import ConfigError, DataError

Row = dict[str, Any]

CHUNK = 2**20
"""Characters of a JSON list that are read at once."""
PARQUET_ROWS = 16
"""Rows of a Parquet file that are Python objects at once: one may hold 100 MB of tests."""


def check_format(path: Path) -> None:
    """Refuse a file that `read_rows` cannot read, by its name.

    Raises:
        ConfigError: the suffix is another.
    """
    if path.suffix not in _READERS:
        raise ConfigError(f"input {path} must be one of *{', *'.join(_READERS)}")


def read_rows(
    path: Path, *, columns: Sequence[str] = (), optional: Sequence[str] = (), after: int = 0
) -> Iterator[tuple[int, Row, float]]:
    """Read a file's rows in order; memory holds a few of them (of Parquet, up to one row group).

    Args:
        path: .jsonl, .json (one list) or .parquet.
        columns: read from a Parquet file, which must have them; other formats give all.
        optional: likewise, where it has them.
        after: number of a row that was read before: those up to it are passed over.

    Yields:
        Line number (JSONL) or row number (others), from 1, the row, and about which share of the
        file has been read.

    Raises:
        DataError: the file cannot be read, or lacks a column, or a row is no object; names file
            and row.
    """
    try:
        for number, row, share in _READERS[path.suffix](path, columns, optional, after):
            if number <= after:
                continue
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: must be an object, not {type(row).__name__}")
            yield number, row, share
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {error.reason}") from None


def _jsonl(
    path: Path, columns: Sequence[str], optional: Sequence[str], after: int
) -> Iterator[tuple[int, Any, float]]:
    size, done = path.stat().st_size, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            if number <= after or not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # of the JSON, or of the UTF-8
                raise DataError(f"{path}:{number}: not valid JSON: {error}") from None
            yield number, row, done / size


def _json(
    path: Path, columns: Sequence[str], optional: Sequence[str], after: int
) -> Iterator[tuple[int, Any, float]]:
    size = path.stat().st_size
    with open(path, "rb") as data, io.TextIOWrapper(data, encoding="utf-8-sig") as file:
        text = _JsonText(file)
        if text.take() != "[":
            raise DataError(f"{path}: must hold a JSON list")
        number, separator = 0, text.take() if text.look() == "]" else ","
        while separator == ",":
            number += 1
            try:
                row = text.take_value()
            except ValueError as error:  # of the JSON, or a number longer than Python reads
                why = error.msg if isinstance(error, json.JSONDecodeError) else error
                raise DataError(f"{path}:{number}: not valid JSON: {why}") from None
            yield number, row, data.tell() / size
            separator = text.take()
            if separator not in (",", "]"):
                raise DataError(f"{path}: no ',' or ']' after row {number}")
        if text.look():
            raise DataError(f"{path}: goes on behind the end of its list")


class _JsonText:
    """A file of JSON, of which as much is in memory as the value at hand needs."""

    _NOT_SPACE = re.compile(r"[^ \t\r\n]")

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._position = 0
        self._decode = json.JSONDecoder().raw_decode

    def look(self) -> str:
        """Next character that is not white space; empty at the end of the file."""
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

    def take_value(self) -> Any:
        self.look()
        while True:
            try:
                value, self._position = self._decode(self._text, self._position)
                return value
            except json.JSONDecodeError:  # perhaps only cut off
                if not self._grow():
                    raise

    def _grow(self) -> bool:
        more = self._file.read(max(CHUNK, len(self._text)))
        self._text, self._position = self._text[self._position :] + more, 0
        return bool(more)


def _parquet(
    path: Path, columns: Sequence[str], optional: Sequence[str], after: int
) -> Iterator[tuple[int, Any, float]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path, buffer_size=CHUNK, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if absent := [name for name in columns if name not in names]:
                raise DataError(
                    f"{path}: has no column {' nor '.join(absent)}; it has {', '.join(names)} "
                    "(--prompt-key, --answer-key name those of own files)"
                )
            there = [name for name in (*columns, *optional) if name in names]
            groups, passed = list(range(file.num_row_groups)), 0
            while groups and passed + file.metadata.row_group(groups[0]).num_rows <= after:
                passed += file.metadata.row_group(groups.pop(0)).num_rows
            batches = file.iter_batches(
                PARQUET_ROWS, row_groups=groups, columns=there, use_threads=False
            )
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=passed + 1):
                yield number, row, number / file.metadata.num_rows
    except ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
