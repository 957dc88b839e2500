"""The width sweep: every rule at several widths, then at its best one on other seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gapo_megatron.objective import METHODS
from studies.arena.arms import (
    PAPER,
    RATE,
    RATES,
    SCALED,
    STALENESS,
    WITHOUT_WIDTH,
    scaled,
    setting_of,
)
from studies.arena.jobs import SELECTION, Job, Store
from studies.arena.train import Setting
from studies.arena.verdicts import late

FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Tried for every rule, times its first width."""
SMALLEST, LARGEST = 1 / 8, 64.0
"""How far a sweep is continued whose best width is at its end."""
MODES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "stale": {"staleness": STALENESS, "weights": "none"},
    "stale, around the sampler": {"staleness": STALENESS, "around_sampler": True},
}
FEW = ("gapo", "gapo_proportional", "gspo_asym", "dapo", "cispo", *WITHOUT_WIDTH)
"""Rules of the cells with other group sizes, and of those around the sampler."""


class Cell(NamedTuple):
    """A rule under conditions, whose best width is sought."""

    rule: str
    mode: str
    rate: float
    group_size: int

    @property
    def conditions(self) -> tuple[str, float, int]:
        """What cells have in common that are compared."""
        return self[1:]


def cells() -> list[Cell]:
    """All cells, by conditions."""
    rules = (*PAPER, *SCALED, *WITHOUT_WIDTH)
    return [
        *(
            Cell(rule, mode, rate, 8)
            for mode in ("fresh", "stale")
            for rate in RATES
            for rule in rules
        ),
        *(Cell(rule, "fresh", RATE, k) for k in (4, 16) for rule in FEW),
        *(Cell(rule, "stale, around the sampler", RATES[1], 8) for rule in FEW),
    ]


def setting(cell: Cell, factor: float, scales: Mapping[str, float]) -> Setting:
    """The arm of a cell at `factor` times its first width."""
    rule = cell.rule
    if rule in WITHOUT_WIDTH:
        method = WITHOUT_WIDTH[rule]
    else:
        first = 1.0 if rule in PAPER else scales[rule]
        method = scaled(METHODS[rule], factor * first)
    return setting_of(
        method, learning_rate=cell.rate, group_size=cell.group_size, **MODES[cell.mode]
    )


def sweep(
    store: Store, scales: Mapping[str, float], *, num_processes: int = 0
) -> dict[Cell, dict[float, Tensor]]:
    """Outcomes on the selection seeds by cell and factor, each `late`; trains what is missing.

    A sweep whose best width is at its end is continued. With no processes, nothing is trained and
    what is missing is left out.
    """
    wanted = {cell: list(FACTORS) for cell in cells() if cell.rule not in WITHOUT_WIDTH}
    while True:
        jobs = {
            (cell, factor): Job(setting(cell, factor, scales), SELECTION)
            for cell, factors in wanted.items()
            for factor in factors
        }
        if num_processes:
            store.run(jobs.values(), num_processes=num_processes)
        found: dict[Cell, dict[float, Tensor]] = {cell: {} for cell in wanted}
        for (cell, factor), job in jobs.items():
            if job in store:
                found[cell][factor] = late(store.read(job.setting, [SELECTION]))
        more = {
            cell: factor
            for cell, outcomes in found.items()
            if (factor := _next_factor(outcomes)) and factor not in wanted[cell]
        }
        if not more:
            return found
        for cell, factor in more.items():
            wanted[cell].append(factor)


def best_factor(outcomes: Mapping[float, Tensor]) -> float:
    """The factor with the highest sum of pass@1 and pass@64."""
    return max(outcomes, key=lambda factor: float(outcomes[factor].mean(dim=1).sum()))


def best_settings(
    found: Mapping[Cell, Mapping[float, Tensor]], scales: Mapping[str, float]
) -> dict[Cell, tuple[float, Setting]]:
    """Every cell's best factor and its arm; cells whose sweep has not begun are left out."""
    factors = {cell: best_factor(outcomes) for cell, outcomes in found.items() if outcomes}
    factors |= {cell: 1.0 for cell in cells() if cell.rule in WITHOUT_WIDTH}
    return {
        cell: (factors[cell], setting(cell, factors[cell], scales))
        for cell in cells()
        if cell in factors
    }


def _next_factor(outcomes: Mapping[float, Tensor]) -> float | None:
    """The factor to try next if the best one is the smallest or the largest tried."""
    if not outcomes:
        return None
    best = best_factor(outcomes)
    if best == max(outcomes) and best < LARGEST:
        return 2 * best
    if best == min(outcomes) and best > SMALLEST:
        return best / 2
    return None
