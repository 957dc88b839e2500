"""Progress and reports of a conversion and its checks: on the screen, and beside the weights."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from gapo_megatron import __version__
from gapo_megatron.formats.folder import REPORT_NAME
from gapo_megatron.io.files import real

_SECONDS_BETWEEN_LINES = 10.0


@dataclass(slots=True)
class Pass:
    """Bytes read or written in one pass over the weights, and its duration."""

    num_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.num_bytes / 1e9 / max(self.seconds, 1e-9)
        return f"{size(self.num_bytes)} in {self.seconds:.1f} s, {rate:.2f} GB/s"


@dataclass(frozen=True, slots=True)
class Result:
    """A conversion that passed its checks."""

    output: Path
    checks: Mapping[str, str]
    """What each check found."""
    written: Pass


@contextlib.contextmanager
def progress(title: str, num_bytes: int) -> Iterator[tuple[Pass, Callable[[int], None]]]:
    """Show the progress of `num_bytes`: a bar in a terminal, else a line every ten seconds.

    Yields:
        The pass, complete when the block ends, and a function to call with each number of bytes
        done, from any thread.
    """
    # On stderr, so that a pipe gets the report alone.
    done, start, lock = Pass(), time.monotonic(), threading.Lock()
    console = Console(stderr=True, markup=False)
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


def size(num_bytes: int) -> str:
    """A number of bytes in a readable unit, e.g. 3.09 GB."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= power:
            return f"{num_bytes / power:.2f} {unit}"
    return f"{num_bytes} B"


def write_report(
    folder: Path, *, source: Path, dtypes: Collection[torch.dtype], checks: Mapping[str, str]
) -> None:
    """Write a folder's source and the checks it passed to a file beside its weights.

    transformers, vLLM and Megatron ignore the file.
    """
    content = {
        "source": str(real(source)),
        "tool": f"gapo_megatron {__version__}",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtypes": sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}),
        "checks": dict(checks),
    }
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (folder / REPORT_NAME).write_text(text, encoding="utf-8")


def show(result: Result, *, next_step: str) -> None:
    """Print what was converted, what the checks found, and the next command."""
    console = Console(markup=False)
    if not console.is_terminal:
        console.width = 160
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("check")
    table.add_column("result", overflow="fold")
    for name, found in result.checks.items():
        table.add_row(name, found)
    console.print(table)
    print(f"\noutput: {result.output} ({result.written})\nnext:   {next_step}")
