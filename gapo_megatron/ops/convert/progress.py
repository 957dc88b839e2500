"""Progress of a pass over the weights, and its speed."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_SECONDS_BETWEEN_LINES = 10.0


@dataclass(slots=True)
class Pass:
    """Bytes that went through one pass over the weights, and the seconds it took."""

    num_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.num_bytes / 1e9 / max(self.seconds, 1e-9)
        return f"{size(self.num_bytes)} in {self.seconds:.1f} s, {rate:.2f} GB/s"


@contextlib.contextmanager
def progress(title: str, num_bytes: int) -> Iterator[tuple[Pass, Callable[[int], None]]]:
    """Show a pass over `num_bytes`: a bar in a terminal, a line every ten seconds elsewhere.

    Yields:
        The pass, complete when the block ends, and the function to call with the bytes that are
        done, from any thread.
    """
    done, start, lock = Pass(), time.monotonic(), threading.Lock()
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(f"{title:8}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bar.add_task(title, total=num_bytes)
    next_line = start + _SECONDS_BETWEEN_LINES

    def on_bytes(number: int) -> None:
        nonlocal next_line
        with lock:
            done.num_bytes += number
            done.seconds = time.monotonic() - start
            bar.advance(task, number)
            if not console.is_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
                left = done.seconds * (num_bytes / done.num_bytes - 1)
                print(f"{title}: {done}, {left:.0f} s left", file=sys.stderr, flush=True)

    with bar:
        yield done, on_bytes
    done.seconds = time.monotonic() - start


def waiting(title: str) -> contextlib.AbstractContextManager[object]:
    """Show that something is under way whose end is not known; in a terminal only."""
    return Console(stderr=True).status(title)


def size(num_bytes: int) -> str:
    """Bytes in a unit to read: 3.09 GB."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= power:
            return f"{num_bytes / power:.2f} {unit}"
    return f"{num_bytes} B"
