"""Rules of 2026, each beside its parent: the same method without the rule (question 13).

    python -m studies.arena.nearest            train what is missing, then print the table
    python -m studies.arena.nearest report     the table of what is trained or archived
    python -m studies.arena.nearest pack       write all results to arena/nearest.npz

README.md has the question, what was fixed beforehand, and the answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gapo_megatron.objective import METHODS, Method
from gapo_megatron.objective.diagnostics import SUMS
from studies.arena import tables
from studies.arena.arms import NEAREST, read_scales, scaled, setting_of
from studies.arena.jobs import Job, Store
from studies.arena.train import QUARTERS, Setting, Trained
from studies.arena.verdicts import OUTCOMES, Pair, compare

CHUNKS = (100, 101)
"""Chunks of seeds that no other question has: 6400 to 6527."""
FACTORS = (2.0, 16.0)
"""Times the first width: one at which clips act much, and one near the rules' best."""
ARCHIVE = Path(__file__).with_name("nearest.npz")


def parent(method: Method) -> Method:
    """The clipped surrogate with the widths, the aggregation and the advantages of a rule.

    ATR's band of r - 1 - ln r <= delta becomes the symmetric one of its parent, GRPO's 0.2.
    """
    if method.name == "atr":
        method = replace(method, eps_low=0.2, eps_high_max=0.2)
    return replace(
        method,
        name=f"parent of {method.name}",
        family="clipped",
        is_band=True,
        virtual_correct=0,
        eps_low_correct=None,
        eps_high_wrong=None,
        rescue_noise=None,
        decay_low=None,
        decay_high=None,
    )


def first_factor(method: Method) -> float:
    """First width over the published one: that of `grpo` or of `dapo`, by the aggregation."""
    return read_scales()["grpo" if method.aggregation == "sequence_mean" else "dapo"]


def arms() -> dict[str, Setting]:
    """Every rule and its parent at the registered widths, fresh batches, rate 0.05."""
    return dict(_arms())


def pairs() -> list[Pair]:
    """Each rule and its parent at the same width."""
    return [
        (f"{name}, x {factor:g}", f"parent of {name}, x {factor:g}")
        for factor in FACTORS
        for name in NEAREST
    ]


def _arms() -> Iterator[tuple[str, Setting]]:
    for factor in FACTORS:
        for name in NEAREST:
            for method in (METHODS[name], parent(METHODS[name])):
                times = factor * first_factor(method)
                yield f"{method.name}, x {factor:g}", setting_of(scaled(method, times))


def table(store: Store) -> str:
    """Outcomes of every pair, and what the two clips did, in Markdown."""
    settings = arms()
    found = {
        name: store.read(setting, CHUNKS)
        for name, setting in settings.items()
        if all(Job(setting, chunk) in store for chunk in CHUNKS)
    }
    compared = compare(found, pairs())
    head = ["rule", "pass@1, %", "pass@64, %", *(f"minus its parent: {one}" for one in OUTCOMES)]
    head += ["lost mass, %", "the parent's"]
    lines = []
    for pair in pairs():
        if pair not in compared:
            lines.append([pair[0], *[tables.MISSING] * (len(head) - 1)])
            continue
        level = [tables.late_mean(found[pair[0]], k) for k in (1, 64)]
        cells = tables.differences_of(compared, pair)
        lines.append([pair[0], *level, *cells, *(lost(found[name]) for name in pair)])
    return tables.markdown(head, lines)


def lost(trained: list[Trained]) -> str:
    """Gradient mass that the clip removes, of all responses in the second half of training."""
    names = ("gradient_mass_lost", "gradient_mass")
    above, below = (
        sum(float(one.per_c[QUARTERS // 2 :, SUMS.index(name)].sum()) for one in trained)
        for name in names
    )
    return f"{100 * above / below:.1f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.arena.nearest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", nargs="?", default="run", choices=["run", "report", "pack"])
    parser.add_argument("--folder", type=Path, default=Path("runs/arena"))
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    store = Store(arguments.folder, archive=ARCHIVE)
    jobs = [Job(setting, chunk) for setting in arms().values() for chunk in CHUNKS]
    if arguments.do == "run":
        store.run(jobs, num_processes=arguments.processes)
    done = [job for job in jobs if job in store]
    if arguments.do == "pack":
        store.pack(done, ARCHIVE)
        return
    print(f"{len(done)} of {len(jobs)} trainings, {store.seconds(done):.0f} core seconds")
    print(table(store))


if __name__ == "__main__":
    main()
