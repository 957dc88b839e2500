"""The dose of GAPO's widths: what they change against the fixed clip, on the same ratios.

    python -m studies.arena.dose

Trains GAPO on the first chunk of seeds at the paper's widths and at its best ones, and prints the
share of decisions on correct responses, and of their gradient, that the fixed clip would make
otherwise. The archive has no such sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gapo_megatron.objective.diagnostics import DOSE
from studies.arena.arms import RATES, read_scales
from studies.arena.jobs import EVALUATE_EVERY, Job, Store
from studies.arena.sweep import Cell, best_factor, setting, sweep
from studies.arena.tables import markdown
from studies.arena.train import QUARTERS, train


def rows() -> Iterator[list[str]]:
    """Rate, factor, and both shares over all of training and in its last quarter."""
    scales = read_scales()
    swept = sweep(Store(Path("runs/arena")), scales)
    for rate in RATES:
        cell = Cell("gapo", "fresh", rate, 8)
        for factor in (1.0, best_factor(swept[cell])):
            job = Job(setting(cell, factor, scales), 0)
            dose = train(job.setting, job.seeds, evaluate_every=EVALUATE_EVERY).dose
            assert dose is not None
            line = [f"{rate:g}", f"x {factor:g}"]
            for sums in (dose.sum(dim=0), dose[QUARTERS - 1]):
                of = dict(zip(DOSE, sums.tolist(), strict=True))
                line.append(f"{100 * of['decisions'] / of['sequences']:.2f}")
                line.append(f"{100 * of['gradient_mass_changed'] / of['gradient_mass']:.2f}")
            yield line


if __name__ == "__main__":
    head = ["rate", "widths", "decisions, %", "gradient, %"]
    print(markdown([*head, "last quarter: decisions, %", "gradient, %"], rows()), end="")
