"""Tables of the trained arms; missing ones are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from studies.arena import tables, widths
from studies.arena.arms import CHUNKS, RATE, RATES, read_scales
from studies.arena.jobs import SELECTION, Job, Store
from studies.arena.sweep import Cell, setting
from studies.arena.tables import Arms, conditions
from studies.arena.train import Setting
from studies.arena.verdicts import Results

HEAD = """# The arena's tables

What `.venv/bin/python -m studies.arena report` prints; [README.md](README.md) explains it.
Differences are in percentage points, with intervals that hold for all rows of a table together.
"""
Table = Callable[[Arms, Results], str]
TABLES: dict[str, tuple[str, Table]] = {
    "Probes": ("probes", tables.probes),
    "Probes: what they do by c": ("probes", tables.by_c),
    "Probes: gradient that the clip removes": ("probes", tables.removed),
    "Aggregation and advantages": ("aggregation", tables.outcomes),
    "Importance weights": ("weights", tables.weights),
    "Proportional widths": ("proportional", tables.proportional),
    "Transformer": ("transformer", tables.outcomes),
    "Transformer: what they do by c": ("transformer", tables.by_c),
    "Transformer, four times wider": ("transformer, x 4", tables.outcomes),
    "Transformer, dapo at 16 times": ("transformer, dapo wider", tables.added_outcomes),
    "Transformer, stale": ("transformer, stale", tables.outcomes),
    "Transformer, stale, four times wider": ("transformer, stale, x 4", tables.outcomes),
}
"""Title -> question whose arms it shows, and the function that makes it."""


def all_tables(
    asked: Mapping[str, Arms],
    store: Store,
    swept: Mapping[Cell, Mapping[float, Tensor]],
    best: Mapping[Cell, tuple[float, Setting]],
) -> str:
    """All tables as one page, each under its title."""
    return "\n".join(_sections(asked, store, swept, dict(_by_conditions(best))))


def _sections(
    asked: Mapping[str, Arms],
    store: Store,
    swept: Mapping[Cell, Mapping[float, Tensor]],
    at_best: Mapping[str, Arms],
) -> Iterator[str]:
    yield HEAD
    yield f"## The sweep\n\n{tables.sweeps(swept)}"
    yield f"## Width or rule\n\n{widths.width_or_rule(swept)}"
    yield f"## How sure the best widths are\n\n{widths.best_widths(swept, read_scales())}"
    found_by = {words: _found("best", arms, store) for words, arms in at_best.items()}
    pairs = {words: (arms, found_by[words]) for words, arms in at_best.items()}
    yield f"## GAPO and the fixed clip: best widths\n\n{widths.fixed_clip(pairs, swept)}"
    yield f"## GAPO and the fixed clip: equal factors\n\n{widths.equal_factors(swept)}"
    first = {
        cell.rule: setting(cell, 1.0, read_scales())
        for cell in swept
        if cell.conditions == ("fresh", RATE, 8)
    }
    chosen = {
        name: store.read(arm, [SELECTION])
        for name, arm in first.items()
        if Job(arm, SELECTION) in store
    }
    if chosen:
        yield f"## By c: first widths\n\n{_seeds(chosen)}{tables.by_c(first, chosen)}"
    for rate in RATES[:2]:
        arms = _probes_at(asked["probes"], rate)
        found_by[f"probes, rate {rate:g}"] = _found("probes", arms, store)
    yield f"## Correlations by quarter\n\n{tables.correlations_by_quarter(found_by)}"
    for title, question, arms, table in _tables(at_best, asked):
        found = _found(question, arms, store)
        notice = _missing(arms, found)
        shown = f"{_seeds(found)}{table(arms, found)}" if found else ""
        yield f"## {title}\n\n{notice}{shown}"


def _seeds(found: Results) -> str:
    number = sum(one.curve.shape[-1] for one in next(iter(found.values())))
    return f"{number} seeds.\n\n"


def _by_conditions(best: Mapping[Cell, tuple[float, Setting]]) -> Iterator[tuple[str, Arms]]:
    """Conditions in words, and the arms of their rules at their best widths."""
    groups: dict[str, dict[str, Setting]] = {}
    for cell, (_, arm) in best.items():
        groups.setdefault(conditions(cell), {})[cell.rule] = arm
    yield from groups.items()


def _tables(
    at_best: Mapping[str, Arms], asked: Mapping[str, Arms]
) -> Iterator[tuple[str, str, Arms, Table]]:
    """Title, question, arms and function of all tables."""
    for words, arms in at_best.items():
        yield f"Best widths: {words}", "best", arms, tables.outcomes
        if words.startswith("fresh") and words.endswith("k 8"):
            yield f"Single steps: {words}", "best", arms, tables.single_steps
    usual = f"fresh, rate {RATE:g}, k 8"
    if usual in at_best:
        yield f"By c: {usual}", "best", at_best[usual], tables.by_c
        yield f"Correlations by c: {usual}", "best", at_best[usual], tables.correlations_by_c
    for title, (question, table) in TABLES.items():
        yield title, question, asked[question], table
    for rate in RATES[:2]:
        arms = _probes_at(asked["probes"], rate)
        yield f"Single steps: probes, rate {rate:g}", "probes", arms, tables.single_steps


def _probes_at(arms: Arms, rate: float) -> Arms:
    """Probes at one learning rate by the rest of their names."""
    end = f", rate {rate:g}"
    return {name.removesuffix(end): arm for name, arm in arms.items() if name.endswith(end)}


def _found(question: str, arms: Arms, store: Store) -> Results:
    """Arms with results of all chunks."""
    found = {}
    for name, arm in arms.items():
        try:
            found[name] = store.read(arm, range(CHUNKS[question]))
        except FileNotFoundError:
            continue
    return found


def _missing(arms: Arms, found: Results) -> str:
    """Name missing arms and the command that trains them; empty if there are none."""
    missing = [name for name in arms if name not in found]
    if not missing:
        return ""
    return (
        f"Missing: {len(missing)} of {len(arms)} arms ({'; '.join(missing)}). "
        "`make arena` trains them.\n\n"
    )
