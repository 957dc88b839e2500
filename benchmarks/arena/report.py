"""Tables and figures of the trained arms; missing ones are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.arena import figures, tables
from benchmarks.arena.arms import CHUNKS, SEEDS_PER_CHUNK
from benchmarks.arena.jobs import read
from benchmarks.arena.tables import Arms
from benchmarks.arena.train import Setting
from benchmarks.arena.verdicts import Results
from gapo_megatron.ops.report.style import Exhibit, style

TABLES: dict[str, tuple[str, Callable[[Arms, Results], str]]] = {
    "Rules: outcomes": ("rules", tables.outcomes),
    "Rules: what they do by c": ("rules", tables.by_c),
    "Stale rules": ("stale rules", tables.outcomes),
    "Clip alone": ("clip alone", tables.outcomes),
    "Probes": ("probes", tables.probes),
    "Rates": ("rates", tables.rates),
    "Widths": ("widths", tables.widths),
    "Aggregation and advantages": ("aggregation", tables.outcomes),
    "Importance weights": ("weights", tables.weights),
    "Proportional widths": ("proportional", tables.proportional),
}
"""Title -> question whose arms it shows, and the function that makes it."""
FIGURES: dict[str, tuple[str, Callable[[Arms, Results], Exhibit]]] = {
    "by_c": ("rules", figures.by_c),
    "verdicts": ("rules", figures.verdicts),
    "verdicts_stale": ("stale rules", figures.verdicts),
    "verdicts_clip_alone": ("clip alone", figures.verdicts),
    "frontier": ("rules", figures.frontier),
    "rates": ("rates", figures.rates),
    "widths": ("widths", figures.widths),
}
"""Stem of the files -> question whose arms it shows, and the function that makes it."""


def report(asked: Mapping[str, Mapping[str, Setting]], folder: Path) -> None:
    """Print the tables and write the figures to `folder`/report."""
    found = {question: _found(question, arms, folder) for question, arms in asked.items()}
    for title, (question, table) in TABLES.items():
        print(f"## {title}\n")
        if notice := _missing(question, asked[question], found[question], folder):
            print(f"{notice}\n")
        if found[question]:
            seeds = CHUNKS[question] * SEEDS_PER_CHUNK
            print(f"{seeds} seeds.\n\n{table(asked[question], found[question])}")
    (folder / "report").mkdir(parents=True, exist_ok=True)
    for stem, (question, figure) in FIGURES.items():
        with style():
            exhibit = figure(asked[question], found[question])
            if exhibit.rows:
                for path in exhibit.write(folder / "report" / stem):
                    print(path)
            else:
                print(f"{stem}: not drawn, too few results for {question!r}")


def _found(question: str, arms: Arms, folder: Path) -> Results:
    """Arms with results of all chunks."""
    found = {}
    for name, setting in arms.items():
        try:
            found[name] = read(setting, CHUNKS[question], folder)
        except FileNotFoundError:
            continue
    return found


def _missing(question: str, arms: Arms, found: Results, folder: Path) -> str:
    """Name missing arms and the command that trains them; empty if there are none."""
    missing = [name for name in arms if name not in found]
    if not missing:
        return ""
    return (
        f"Missing: {len(missing)} of {len(arms)} arms of {question!r} "
        f"({'; '.join(missing)}). `python -m benchmarks.arena --folder {folder}` trains them."
    )
