"""What preparation has found out about each row, kept for when the process dies half-way.

Beside the folder that is being made lies `.OUT.unfinished`:

- rows.jsonl: first what it belongs to (inputs, options, code), then one line for each row, all with
  their checksums.
- tests.jsonl: of code, the tests that the lines name; the output has the same file, by a link.
- lock: locked for as long as the process that writes lives.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.files import real
from gapo_megatron.ops.prepare.output import MANIFEST

logger = logging.getLogger(__name__)

ROWS, TESTS = "rows.jsonl", "tests.jsonl"
FLUSH_S = 5.0
"""Between two flushes to disk: what a kill may cost."""


class Journal:
    """One entry per row of the inputs, in their order.

    Entries are written some seconds at a time, each time tests before the lines that name them, and
    both forced to disk. So a line that is whole can be relied on, whatever ended the process.
    """

    def __init__(self, rows: BinaryIO, tests: BinaryIO) -> None:
        self.num_rows = 0
        self.last: dict[str, Any] | None = None
        """Entry of the last row."""
        self._rows = rows
        self._tests = tests
        self._unwritten: list[bytes] = []
        self._flushed_at = time.monotonic()

    @classmethod
    @contextmanager
    def open(cls, output: Path, *, belongs_to: dict[str, Any]) -> Iterator[Self]:
        """Continue the journal of `output`, or begin one; it is gone when the block has ended well.

        So it is after a DataError, since the inputs must change, and where the output is whole
        already. Whatever else ends the block leaves it to be continued.

        Args:
            output: folder that is being made.
            belongs_to: what entries depend on, JSON; entries of anything else are discarded.

        Raises:
            ConfigError: another process has it open, or it cannot be made.
        """
        output = real(output)
        folder = output.with_name(f".{output.name}.unfinished")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _check_ours(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None
        with ExitStack() as stack:
            lock = stack.enter_context(open(folder / "lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{output} is being made by another process") from None
            rows, tests = (
                stack.enter_context(open(folder / name, "a+b")) for name in (ROWS, TESTS)
            )
            journal = cls(rows, tests)
            if not output.exists():  # else these may be its tests
                journal._continue(belongs_to)
            try:
                yield journal
            except (DataError, ConfigError) as error:
                whole = (output / MANIFEST).exists()
                if isinstance(error, DataError) or whole or not os.path.getsize(folder / ROWS):
                    shutil.rmtree(folder)
                raise
            shutil.rmtree(folder)

    def add(self, entry: dict[str, Any], *, tests: str = "") -> None:
        """Add the next row's. `tests` go into their own file; the entry's `answer` says where."""
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
            yield from (json.loads(line)["entry"] for line in file)

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return sum(os.fstat(file.fileno()).st_size for file in (self._rows, self._tests))

    def link_tests(self, folder: Path) -> None:
        """Let the folder have the file of tests, too."""
        os.link(self._tests.name, folder / TESTS)

    def _flush(self) -> None:
        for file, data in ((self._tests, b""), (self._rows, b"".join(self._unwritten))):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._unwritten.clear()
        self._flushed_at = time.monotonic()

    def _continue(self, belongs_to: dict[str, Any]) -> None:
        """Find the last entry that is whole, with its tests, and cut off what follows it."""
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
                logger.warning("continuing behind the %d rows that were done before", self.num_rows)
        elif found := _whole(head):
            others = sorted(key for key in belongs_to if found.get(key) != belongs_to[key])
            logger.warning(
                "starting from the first row: an interrupted run had other %s", ", ".join(others)
            )
        elif head:
            logger.warning(
                "starting from the first row: what an interrupted run left is damaged, or another "
                "version's"
            )
        for file, end in ((self._rows, rows_end), (self._tests, tests_end)):
            file.truncate(end)
            file.seek(end)
        if not rows_end:
            self._unwritten.append(_line(belongs_to))


def _check_ours(folder: Path) -> None:
    """Refuse a folder that holds anything but a journal: it is written to, and removed at the end.

    Raises:
        ConfigError: names it and what is in it.
        OSError: it cannot be read.
    """
    others = sorted({path.name for path in folder.iterdir()} - {"lock", ROWS, TESTS})
    if folder.is_symlink() or others:
        what = f"holds {', '.join(others[:3])}" if others else "is a link"
        raise ConfigError(f"{folder} {what}: it must be new, or what an interrupted run has left")


def _line(entry: dict[str, Any]) -> bytes:
    data = json.dumps(entry, sort_keys=True).encode()
    return b'{"crc32": %d, "entry": %s}\n' % (zlib.crc32(data), data)


def _whole(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None of one that is not as it was written."""
    try:
        entry: dict[str, Any] = json.loads(line)["entry"]
        return entry if line == _line(entry) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _tests_end(entry: dict[str, Any] | None) -> int:
    """Bytes of the tests up to those of this entry; 0 if it has none."""
    place = entry and entry["answer"]
    return place["offset"] + place["length"] + 1 if isinstance(place, dict) else 0
