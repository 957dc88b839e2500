"""Throughputs of a GPU, kept in the repository: `--baseline`. The standard library alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gapo_megatron.io.files import write_atomically
from tests.gpu.report import rows_of

FOLDER = Path("benchmarks/baselines")
UNITS = ("tokens/s", "MFU", "TFLOP/s", "GB/s")
"""Units of throughputs: more is better."""
SHARE = 0.9
"""A throughput below this share of the baseline's is slower. (A guess: how much they differ from
run to run is not known until a GPU has told.)"""


def path_of(device: str) -> Path:
    """The file of a device, by the name it calls itself."""
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '_', device).strip('_')}.json"


def throughputs(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """ "part: what" -> value and unit, of parts that have passed."""
    return {
        f"{result['part']}: {row.what}": {"value": row.value, "unit": row.unit}
        for result in results
        if result["status"] == "passed"
        for row in rows_of(result)
        if row.unit in UNITS and isinstance(row.value, float)
    }


def compare(
    path: Path,
    about: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    *,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Compare with a file, and add what it lacks: a value that it has stays until it is removed.

    Args:
        path: of the baseline; need not be there.
        about: identity of the results, written beside new values.
        results: of parts.
        say: takes a line.

    Returns:
        Names of the throughputs below `SHARE` of the baseline's.
    """
    kept: dict[str, Any] = {}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
    found = throughputs(results)
    slower = []
    for name, now in found.items():
        if name not in kept:
            say(f"{name}: {now['value']:.4g} {now['unit']} (new)")
            continue
        share = now["value"] / kept[name]["value"]
        is_slower = not share >= SHARE  # nor is NaN as fast
        slower += [name] * is_slower
        said = f", SLOWER: below {SHARE:g}" if is_slower else ""
        was = kept[name]
        say(f"{name}: {now['value']:.4g} {now['unit']}, {share:.3f} of {was['commit'][:9]}'s{said}")
    origin = {"commit": about["commit"], "versions": about["versions"], "tiny": about["tiny"]}
    added = {
        name: now | origin
        for name, now in found.items()
        if name not in kept and 0 < now["value"] < math.inf
    }
    if added:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(kept | added, indent=1, sort_keys=True) + "\n")
        say(f"In {path}: {len(added)} new of {len(kept | added)}; commit it")
    return slower
