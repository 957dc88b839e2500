"""Pass rates of the language study, from its archive.

    python -m studies.language.tables

Intervals are 95 % Student-t: over prompts for a run, over seeds for the last rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from gapo_tools.evaluation.statistics import Interval, mean_interval
from studies.archive import StudyRun, read_archive

ARCHIVE = Path(__file__).parent
LEVELS = ("words", "keywords", "no_comma", "end")
"""Levels of the held-out prompts, which are in this order, equally many of each."""
AFTER = 10
"""Step whose evaluations are compared: the last that all runs have."""


def table(runs: Sequence[StudyRun]) -> str:
    """Pass rates at every evaluation; gains, and GAPO minus each other method; rates by level."""
    lines = ["| method | seed | step | pass@1, % | pass@4, % |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _levels(runs)]
    lines += ["", f"| after {AFTER} steps, points | seed | pass@1 |", "|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _differences(runs)]
    lines += ["", "| method, seed | level | step | pass@1, % | gain |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _by_level(runs)]
    return "\n".join(lines) + "\n"


def _levels(runs: Sequence[StudyRun]) -> Iterator[list[str]]:
    for run in runs:
        for step, rates in run.solve_rates.items():
            known = [rate for rate in rates.values() if not math.isnan(rate)]
            any_correct = 100 * sum(rate > 0 for rate in known) / len(known)
            level = _bounds(mean_interval([100 * rate for rate in known]), sign="")
            yield [f"`{run.method.name}`", f"{run.seed}", f"{step}", level, f"{any_correct:.1f}"]


def _differences(runs: Sequence[StudyRun]) -> Iterator[list[str]]:
    """Gains of each method, then GAPO minus the others: by seed, and over seeds."""
    by_method: dict[str, dict[int, StudyRun]] = {}
    for run in runs:
        by_method.setdefault(run.method.name, {})[run.seed] = run
    for name, of_seed in by_method.items():
        pairs = {
            seed: _paired(run.solve_rates[AFTER], run.solve_rates[0])
            for seed, run in of_seed.items()
        }
        yield from _rows(f"`{name}`: gain", pairs)
    gapo = by_method.pop("gapo")
    for name, of_seed in by_method.items():
        pairs = {
            seed: _paired(gapo[seed].solve_rates[AFTER], run.solve_rates[AFTER])
            for seed, run in of_seed.items()
        }
        yield from _rows(f"`gapo` minus `{name}`", pairs)


def _by_level(runs: Sequence[StudyRun]) -> Iterator[list[str]]:
    """Pass rates by level, and gains from the first evaluation, of all runs."""
    for run in runs:
        first, *_ = run.solve_rates.values()
        size = len(first) // len(LEVELS)
        for step, rates in run.solve_rates.items():
            for place, level in enumerate(LEVELS):
                own = list(rates)[place * size : (place + 1) * size]
                now, before = ({problem: of[problem] for problem in own} for of in (rates, first))
                known = [rate for rate in now.values() if not math.isnan(rate)]
                shown = f"{100 * sum(known) / len(known):.1f}"
                gain = _bounds(mean_interval(_paired(now, before))) if step else "-"
                yield [f"`{run.method.name}`, {run.seed}", level, f"{step}", shown, gain]


def _paired(ours: dict[str, float], theirs: dict[str, float]) -> list[float]:
    """Differences in points over the problems that both have a verdict for."""
    pairs = ((ours[problem], theirs[problem]) for problem in ours)
    return [100 * (one - other) for one, other in pairs if not math.isnan(one - other)]


def _rows(what: str, by_seed: dict[int, list[float]]) -> Iterator[list[str]]:
    for seed, values in sorted(by_seed.items()):
        yield [what, f"{seed}", _bounds(mean_interval(values))]
    means = [sum(values) / len(values) for values in by_seed.values()]
    if len(means) > 2:
        yield [what, "mean", _bounds(mean_interval(means))]
    else:
        yield [what, "mean", f"{sum(means) / len(means):+.1f}"]


def _bounds(found: Interval, *, sign: str = "+") -> str:
    mean, low, high = (f"{value:{sign}.1f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


if __name__ == "__main__":
    print(table(read_archive(ARCHIVE)), end="")
