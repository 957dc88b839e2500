"""A journal of the finding for each row, so that an interrupted preparation can continue.

It is the folder `.OUT.unfinished` beside the output folder OUT:

- rows.jsonl: a first line with inputs, options and code, then one line per row.
- tests.jsonl: the tests of programs, which the lines refer to; hard-linked into the output.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.files import lock, real
from gapo_tools.preparation.output import TESTS

logger = logging.getLogger(__name__)

ROWS = "rows.jsonl"
FLUSH_S = 5.0
"""Seconds between two flushes to disk; a kill loses at most so much work."""


class Journal:
    """One entry per row of the inputs, in their order.

    Every few seconds, tests and then the lines that refer to them are written and flushed to disk.
    So a whole line can be relied on, however the process ended.
    """

    def __init__(self, rows: BinaryIO, tests: BinaryIO) -> None:
        self.num_rows = 0
        self.last: dict[str, Any] | None = None
        """Entry of the last row that an interrupted preparation looked at."""
        self._rows = rows
        self._tests = tests
        self._unwritten: list[bytes] = []
        self._flushed_at = time.monotonic()

    @classmethod
    @contextmanager
    def open(cls, output: Path, *, belongs_to: dict[str, Any]) -> Iterator[Self]:
        """Continue the journal of `output`, or begin one; removed when the block succeeds.

        It is also removed after a DataError, because the inputs must change, and if the output
        exists. After any other error it stays, to be continued.

        Args:
            output: folder that is being made.
            belongs_to: inputs, options and code that entries depend on, as JSON; entries made with
                others are discarded.

        Raises:
            ConfigError: another process has it open (as far as the file system has locks), or it
                cannot be created.
        """
        output = real(output)
        folder = output.with_name(f".{output.name}.unfinished")
        if output.exists():  # its tests may be the journal's file, which is never to be cut off
            _remove(folder)
        if folder.is_symlink() or (folder.exists() and {*os.listdir(folder)} - {ROWS, TESTS}):
            raise ConfigError(f"{folder} must be a journal of this command: move it away")
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                rows, tests = (stack.enter_context(open(folder / n, "a+b")) for n in (ROWS, TESTS))
                lock(rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is writing {output}") from None
            except OSError as error:
                raise ConfigError(f"cannot create {folder}: {error.strerror}") from None
            journal = cls(rows, tests)
            journal._continue(belongs_to)
            try:
                yield journal
            except (DataError, ConfigError) as error:
                if isinstance(error, DataError) or output.exists():
                    _remove(folder)
                raise
            _remove(folder)

    def add(self, entry: dict[str, Any], *, tests: str = "") -> None:
        """Add the next row's entry; `tests` go into tests.jsonl, and its `answer` says where."""
        if tests:
            data = tests.encode()
            entry["answer"] = {"file": TESTS, "offset": self._tests.tell(), "length": len(data)}
            self._tests.write(data + b"\n")
        self._unwritten.append(_line(entry))
        self.num_rows += 1
        if time.monotonic() > self._flushed_at + FLUSH_S:
            self._flush()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All entries, from the first."""
        self._flush()
        with open(self._rows.name, "rb") as file:
            next(file)
            yield from map(json.loads, file)

    def link_tests(self, folder: Path) -> None:
        """Hard-link tests.jsonl into a folder."""
        os.link(self._tests.name, folder / TESTS)

    def _flush(self) -> None:
        for file, data in ((self._tests, b""), (self._rows, b"".join(self._unwritten))):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._unwritten.clear()
        self._flushed_at = time.monotonic()

    def _continue(self, belongs_to: dict[str, Any]) -> None:
        """Find the last whole entry whose tests are there, and cut off what follows it."""
        num_test_bytes = self._tests.seek(0, os.SEEK_END)
        self._rows.seek(0)
        head = self._rows.readline()
        rows_end = tests_end = 0
        if head == _line(belongs_to):
            rows_end = len(head)
            for line in self._rows:
                entry = _whole(line)
                end = _tests_end(entry) or tests_end
                if not entry or end > num_test_bytes:
                    break
                rows_end, tests_end = rows_end + len(line), end
                self.num_rows, self.last = self.num_rows + 1, entry
            if self.num_rows:
                logger.warning("continuing after the %d rows of an interrupted run", self.num_rows)
        elif head:
            logger.warning(
                "starting from the first row: the interrupted run had other inputs, options or code"
            )
        # New lines replace whatever follows.
        for file, end in ((self._rows, rows_end), (self._tests, tests_end)):
            file.truncate(end)
            file.seek(end)
        if not rows_end:
            self._unwritten.append(_line(belongs_to))


def _remove(folder: Path) -> None:
    """Remove a journal's files, and the folder unless it holds others."""
    for name in (ROWS, TESTS):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True).encode() + b"\n"


def _whole(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None if the line was cut off."""
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return entry if line.endswith(b"\n") else None


def _tests_end(entry: dict[str, Any] | None) -> int:
    """End of this entry's tests in tests.jsonl, in bytes; 0 if it has none."""
    place = entry and entry["answer"]
    return place["offset"] + place["length"] + 1 if isinstance(place, dict) else 0
