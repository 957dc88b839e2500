"""Reads rows of JSONL, JSON, CSV and TSV files, also gzipped, and of Parquet, one at a time."""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import json
import os
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.documents import MAX_BYTES, is_unicode, keys_of, open_file, parse_json

Row = dict[str, Any]

MAX_ROW_BYTES = MAX_BYTES
"""Largest row of JSON or CSV: a row may hold 100 MB of tests."""
MAX_UNPACKED_BYTES = 2**31
"""Largest gzipped JSON list, which is read whole: a few kilobytes may unpack to any size."""
PARQUET_ROWS = 16
"""Rows of a Parquet file that are converted at a time: a row may hold 100 MB of tests."""


def check_format(path: Path) -> None:
    """Refuse a file that `read_rows` cannot read, by its suffix and type.

    Raises:
        ConfigError: unknown suffix.
        DataError: it cannot be opened, or is not a file.
    """
    if _suffix(path) not in _READERS:
        raise ConfigError(
            f"input {path} must be a file *{', *'.join(_READERS)}, or but for .parquet *.gz of it"
        )
    with _opened(path):
        pass


def read_rows(
    path: Path,
    *,
    columns: Sequence[str] = (),
    optional: Sequence[str] | None = (),
    after: int = 0,
) -> Iterator[tuple[int, Row, float]]:
    """Read a file's rows in order.

    Of lines a few rows are in memory, of Parquet a row group, of a JSON list all.

    A row that is a list of objects, as Open-Reasoner-Zero's, becomes an object with the keys "0",
    "1" and so on. The first row of .csv and .tsv files has the names of the columns; their values
    are texts, and None where a cell is empty.

    Args:
        path: .parquet, .json (one list, or JSON lines), .csv, .tsv, or JSON lines with any other
            suffix; .gz behind the suffix, except for Parquet.
        columns: columns to read from a Parquet file, which must have them; other formats give all.
        optional: columns to read from a Parquet file if it has them; None: all.
        after: number of the last row to skip.

    Yields:
        Line number (JSONL) or row number (others, without the row of names), from 1; the row; and
        roughly the share of the file that has been read.

    Raises:
        DataError: the file cannot be read, lacks a column, or a row is not an object; names file
            and row.
    """
    with _opened(path) as file:
        reader = _READERS.get(_suffix(path), _jsonl)
        if reader is _json and _first_character(file) == b"{":
            reader = _jsonl
        for number, row, share in reader(file, path, columns, optional, after):
            if number <= after:
                continue
            if row and isinstance(row, list) and all(isinstance(one, dict) for one in row):
                row = {str(i): one for i, one in enumerate(row)}
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: must be an object, not {reprlib.repr(row)}")
            yield number, row, share


def count_rows(path: Path) -> int:
    """Number of rows of a problem file, without reading the rows of a Parquet file.

    Raises:
        DataError: as `read_rows`.
    """
    if path.suffix == ".parquet":
        with _opened(path) as file, _parquet_file(file, path) as parquet_file:
            return int(parquet_file.metadata.num_rows)
    if _suffix(path) in (".json", ".csv", ".tsv"):
        return sum(1 for _ in read_rows(path))
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


def _suffix(path: Path) -> str:
    """The suffix that names the format: before .gz, if the file is gzipped."""
    inner = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return ".parquet.gz" if (inner, path.suffix) == (".parquet", ".gz") else inner


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's content, unpacked."""
    if _suffix(path) == ".parquet.gz":
        raise DataError(f"{path}: Parquet is compressed already: unpack it")
    try:
        with open_file(path) as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {error.reason}") from None


def _parse(text: str | bytes, path: Path, number: int) -> Any:
    return parse_json(text, where=f"{path}:{number}: the row", error=DataError, is_data=True)


def _first_character(file: BinaryIO) -> bytes:
    """The first byte that is not white space; the file is then at its start again."""
    start = file.read(2**16).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return start[:1]


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1."""
    lines = iter(lambda: file.readline(MAX_ROW_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_ROW_BYTES:
            raise DataError(f"{path}:{number}: a row of more than {MAX_ROW_BYTES} bytes")
        yield number, line


def _share(file: BinaryIO) -> float:
    """Share of the file that has been read; of a gzipped one, of its packed bytes."""
    packed = getattr(file, "fileobj", file)
    return float(packed.tell() / os.fstat(packed.fileno()).st_size)


def _jsonl(
    file: BinaryIO,
    path: Path,
    columns: Sequence[str],
    optional: Sequence[str] | None,
    after: int,
) -> Iterator[tuple[int, Any, float]]:
    for number, line in _lines(file, path):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # files from Windows
        if number > after and line.strip():
            yield number, _parse(line, path, number), _share(file)


def _delimited(
    file: BinaryIO,
    path: Path,
    columns: Sequence[str],
    optional: Sequence[str] | None,
    after: int,
    *,
    delimiter: str,
) -> Iterator[tuple[int, Any, float]]:
    """Rows of texts; a cell may have quotes around it, and then line ends in it."""
    row_number, num_bytes = 0, 0

    def lines() -> Iterator[str]:
        nonlocal num_bytes
        for number, line in _lines(file, path):
            num_bytes += len(line)
            if num_bytes > MAX_ROW_BYTES:  # a quote that is never closed, most likely
                raise DataError(f"{path}:{row_number}: a row of more than {MAX_ROW_BYTES} bytes")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:{row_number}: not valid UTF-8: {error.reason}") from None

    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    names: list[str] = []
    try:
        for values in filter(None, rows):
            num_bytes = 0
            if not names:
                names, row_number = _names(values, path), 1
                continue
            if len(values) != len(names):
                raise DataError(
                    f"{path}:{row_number}: has {len(values)} cells; the row of names has "
                    f"{len(names)}: {', '.join(names)[:500]}"
                )
            pairs = zip(names, values, strict=True)
            yield row_number, {key: one or None for key, one in pairs if key}, _share(file)
            row_number += 1
    except csv.Error as error:
        raise DataError(f"{path}:{row_number}: {error}") from None


def _names(values: Sequence[str], path: Path) -> list[str]:
    """The names of the columns; pandas leaves that of its row numbers empty."""
    for name in filter(None, values):
        if values.count(name) > 1:
            raise DataError(f"{path}: the column {name[:60]!r} is there {values.count(name)} times")
    return [*values]


def _json(
    data: BinaryIO,
    path: Path,
    columns: Sequence[str],
    optional: Sequence[str] | None,
    after: int,
) -> Iterator[tuple[int, Any, float]]:
    """Rows of one list, each parsed by itself, so that an error names its row."""
    content = data.read(MAX_UNPACKED_BYTES + 1 if path.suffix == ".gz" else -1)
    if path.suffix == ".gz" and len(content) > MAX_UNPACKED_BYTES:
        raise DataError(
            f"{path}: a list of more than {MAX_UNPACKED_BYTES} bytes, which is read whole: unpack "
            "it, or write JSON lines"
        )
    text = content.decode("utf-8-sig").rstrip()
    decode, spaces = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n]*")

    def take(at: int) -> tuple[str, int]:
        """The next character that is not white space, and the place behind it."""
        at = spaces.match(text, at).end()  # type: ignore[union-attr]
        return text[at : at + 1], at + 1

    first, at = take(0)
    if first != "[":
        raise DataError(f"{path}: must hold a JSON list")
    number, separator = 0, ","
    if take(at)[0] == "]":
        separator, at = take(at)
    while separator == ",":
        number, start = number + 1, at
        try:
            _, at = decode(text, take(start)[1] - 1)
        except (ValueError, RecursionError):  # what is wrong is said below
            at = len(text)
        if at - start > MAX_ROW_BYTES:
            raise DataError(f"{path}:{number}: a row of more than {MAX_ROW_BYTES} bytes")
        row = _parse(text[start:at], path, number)
        separator, at = take(at)
        if separator not in (",", "]"):
            raise DataError(f"{path}: no ',' or ']' after row {number}")
        yield number, row, at / len(text)
    if take(at)[0]:
        raise DataError(f"{path}: text after the end of the list")


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
        there = [one for one in dict.fromkeys((*columns, *(optional or ()))) if one in names]
        groups, passed = list(range(file.num_row_groups)), 0
        while groups and passed + file.metadata.row_group(groups[0]).num_rows <= after:
            passed += file.metadata.row_group(groups.pop(0)).num_rows
        batches = file.iter_batches(
            PARQUET_ROWS,
            row_groups=groups,
            columns=names if optional is None else there,
            use_threads=False,
        )
        rows = (row for one in batches for row in one.to_pylist(maps_as_pydicts="lossy"))
        for number, row in enumerate(rows, start=passed + 1):
            yield number, row, number / file.metadata.num_rows


@contextmanager
def _parquet_file(data: BinaryIO, path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(data, buffer_size=2**20, pre_buffer=False) as file:
            yield file
    except ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


_READERS: dict[str, Callable[..., Iterator[tuple[int, Any, float]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": functools.partial(_delimited, delimiter=","),
    ".tsv": functools.partial(_delimited, delimiter="\t"),
    ".parquet": _parquet,
}
