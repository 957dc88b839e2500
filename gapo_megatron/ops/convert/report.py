"""Reports of conversions and their checks: on the screen, and beside the weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from gapo_megatron import __version__
from gapo_megatron.hf.folder import REPORT_NAME
from gapo_megatron.io.files import real
from gapo_megatron.ops.convert.progress import size
from gapo_megatron.ops.convert.verify import Tensors

if TYPE_CHECKING:
    from gapo_megatron.ops.convert.directions import Result


def write_report(
    folder: Path, *, source: Path, dtypes: Collection[torch.dtype], checks: Mapping[str, str]
) -> None:
    """Write what a folder was made of, and which checks it passed, beside its weights.

    transformers, vLLM and Megatron do not read it.
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
    """Print what a conversion that passed did, what was checked, and what to do next."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("part")
    for column in ("HF tensors", "size", "dtype", "Megatron parameters", "size", "dtype"):
        table.add_column(column, justify="right")
    for part in result.parts:
        megatron = _cells(part.megatron, part.num_parameters)
        table.add_row(part.name, *_cells(part.hf, part.hf.number), *megatron)
    console.print(table)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("check")
    table.add_column("result", overflow="fold")
    for name, found in result.checks.items():
        table.add_row(name, found)
    console.print()
    console.print(table)
    print(f"\noutput: {result.output} ({result.written})\nnext:   {next_step}")


def _cells(tensors: Tensors, number: int) -> list[str]:
    return [str(number), size(tensors.num_bytes), ", ".join(tensors.dtypes)]
