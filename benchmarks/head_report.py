"""Tables of what benchmarks/head.py has measured."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Record = dict[str, Any]
OURS, NAIVE = "ours", "naive"
MAX_TIME, MAX_MEMORY, MIN_SPEEDUP = 1.1, 0.05, 2.0
"""Aims: time and extra memory of naive's at f = 1; speed-up over exact peers at f = 0.5."""


class Group:
    """Records of one shape, dtype and kind of data."""

    def __init__(self, records: list[Record]) -> None:
        self.alone = {r["provider"]: r for r in records if r["kind"] == "alone"}
        self.times = {
            (r["provider"], r["mode"], r["active"]): r for r in records if r["kind"] == "time"
        }
        self.key = {k: records[0][k] for k in ("shape", "dtype", "data", "device")}
        self.providers = [
            name
            for name, found in self.alone.items()
            if "failed" not in found and (name, "clipped", 1) in self.times
        ]

    def total(self, provider: str, mode: str, active: float) -> list[float] | None:
        """Seconds of forward + backward, sorted."""
        record = self.times.get((provider, mode, active))
        if record is None:
            return None
        pairs = zip(record["forward_s"], record["backward_s"], strict=True)
        return sorted(map(sum, pairs))

    def active(self, mode: str) -> list[float]:
        """Active shares measured, in descending order."""
        return sorted({f for _, m, f in self.times if m == mode}, reverse=True)

    @property
    def title(self) -> str:
        tokens, hidden, vocab = self.key["shape"].split("x")
        return f"T={tokens} H={hidden} V={vocab} {self.key['dtype']}, {self.key['data']}"

    @property
    def flops(self) -> float:
        """FLOP of four matrix products."""
        return 8 * math.prod(map(float, self.key["shape"].split("x")))


def load_records(files: Iterable[Path]) -> list[Record]:
    """Read all lines of the files, in order."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def groups_of(records: list[Record]) -> list[Group]:
    """Records by shape, dtype and data, in the order in which they were measured."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for r in records:
        if r["kind"] != "run":
            found.setdefault((r["shape"], r["dtype"], r["data"], r["device"]), []).append(r)
    return [Group(group) for group in found.values()]


def quantile(ordered: list[float], q: float) -> float:
    """Nearest-rank quantile."""
    return ordered[round(q * (len(ordered) - 1))]


def milliseconds(seconds: float) -> str:
    """Format with three digits or more."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def print_report(records: list[Record], console: Console) -> None:
    """Print tables of errors, memory and times of each group, and its aims."""
    for record in records:
        if record["kind"] == "run":
            versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items() if v)
            console.print(f"{record['machine']}; {versions}", highlight=False)
    for group in groups_of(records):
        console.print(accuracy_table(group))
        console.print(time_table(group))
        for line in aims(group):
            console.print(line, highlight=False)
        console.print()


def accuracy_table(group: Group) -> Table:
    """Table of errors, extra memory, and the path that ran or why none did."""
    table = Table(title=f"Errors and memory: {group.title}", title_justify="left")
    table.add_column("provider", no_wrap=True)
    headings = (
        "D error, rms;D error, max;beyond 3e-4;other bits;dhidden error;dweight error;extra MiB;"
        "launches"
    )
    for heading in headings.split(";"):
        table.add_column(heading, justify="right")
    table.add_column("path")
    for name, r in group.alone.items():
        if "failed" in r:
            table.add_row(name, *["-"] * 8, f"not run: {r['failed']}", style="dim")
            continue
        errors = (r["d_error_rms"], r["d_error_max"])
        gradients = (r["dhidden_error"], r["dweight_error"])
        table.add_row(
            ("" if r["exact"] else "~ ") + name,
            *(f"{x:.1e}" for x in errors),
            f"{r['beyond_gspo_clip']:.0%}",
            f"{r['other_bits']:.1%}",
            *(f"{x:.1e}" for x in gradients),
            f"{r['extra_bytes'] / 2**20:,.1f}",
            str(r.get("launches", "-")),  # files of before this was counted
            r["note"],
        )
    return table


def time_table(group: Group) -> Table:
    """Table of medians at every f; forward, backward, spread and rate at f = 1."""
    table = Table(title=f"Time, ms: {group.title}", title_justify="left")
    table.add_column("provider", no_wrap=True)
    table.add_column("n", justify="right")
    for heading in ("forward", "backward", "both, f=1", "p10..p90", "TFLOP/s"):
        table.add_column(heading, justify="right")
    points = [(m, f) for m in ("clipped", "compacted") for f in group.active(m) if f != 1]
    for mode, f in points:
        table.add_column(f"f={f:g} {mode}", justify="right")
    for name in group.providers:
        first = group.times[name, "clipped", 1]
        ordered = group.total(name, "clipped", 1) or []
        median = statistics.median(ordered)
        parts = (statistics.median(first[k]) for k in ("forward_s", "backward_s"))
        totals = (group.total(name, mode, f) for mode, f in points)
        table.add_row(
            ("" if group.alone[name]["exact"] else "~ ") + name,
            str(len(ordered)),
            *map(milliseconds, parts),
            milliseconds(median),
            "..".join(milliseconds(quantile(ordered, q)) for q in (0.1, 0.9)),
            f"{group.flops / median / 1e12:.3g}",
            *("-" if t is None else milliseconds(statistics.median(t)) for t in totals),
            style="bold" if name.startswith(OURS) else "",
        )
    return table


def aims(group: Group) -> list[str]:
    """Measured ratios beside their aims."""
    lines = []

    def aim(text: str, met: bool) -> None:
        lines.append(f"{'met    ' if met else 'NOT MET'}  {text}")

    if OURS not in group.providers:
        return ["ours did not run"]
    ours = group.alone[OURS]
    aim(f"largest error of D {ours['d_error_max']:.1e}", ours["exact"])
    if NAIVE in group.providers:
        time, naive_time = (
            statistics.median(group.total(name, "clipped", 1) or []) for name in (OURS, NAIVE)
        )
        ratio = time / naive_time
        aim(f"f=1: {ratio:.2f} of naive's time, at most {MAX_TIME}", ratio <= MAX_TIME)
        memory = ours["extra_bytes"] / group.alone[NAIVE]["extra_bytes"]
        aim(f"{memory:.1%} of naive's extra memory, below {MAX_MEMORY:.0%}", memory < MAX_MEMORY)
    halves = {
        name: statistics.median(total)
        for name in group.providers
        if (total := group.total(name, "clipped", 0.5))
    }
    exact = [name for name in halves if group.alone[name]["exact"] and not name.startswith(OURS)]
    if exact and OURS in halves:
        best = min(exact, key=halves.__getitem__)
        ratio = halves[best] / halves[OURS]
        text = f"f=0.5: {ratio:.2f} x as fast as {best}, the fastest exact peer"
        aim(f"{text}; at least {MIN_SPEEDUP}", ratio >= MIN_SPEEDUP)
    if NAIVE in halves and NAIVE not in exact and OURS in halves:
        # Stated in any case, because float32 logits are usually considered exact.
        error = group.alone[NAIVE]["d_error_max"]
        ratio = halves[NAIVE] / halves[OURS]
        lines.append(
            f"         f=0.5: {ratio:.2f} x as fast as naive, not exact here ({error:.1e})"
        )
    return lines
