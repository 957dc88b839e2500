"""The arena: every clip rule at its best width, on tasks small enough for hundreds of seeds.

    python -m studies.arena              train what is missing, then report
    python -m studies.arena report       tables of what is trained or archived, to FOLDER/tables.md
    python -m studies.arena pack         write all results to arena/results.npz

README.md has the questions, the rules of analysis, and the answers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from studies.arena.arms import CHUNKS, questions, read_scales
from studies.arena.jobs import ARCHIVE, SELECTION, Job, Store
from studies.arena.report import all_tables
from studies.arena.sweep import best_settings, setting, sweep


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.arena",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", nargs="?", default="run", choices=["run", "report", "pack"])
    parser.add_argument("--folder", type=Path, default=Path("runs/arena"))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    store, scales = Store(arguments.folder), read_scales()
    training = arguments.processes if arguments.do == "run" else 0
    asked = questions(scales)
    swept = sweep(store, scales, num_processes=training)
    best = best_settings(swept, scales)
    jobs = [Job(arm, chunk) for chunk in range(CHUNKS["best"]) for _, arm in best.values()]
    jobs += [
        Job(arm, chunk)
        for question, arms in asked.items()
        for chunk in range(CHUNKS[question])
        for arm in arms.values()
    ]
    jobs += [
        Job(setting(cell, factor, scales), SELECTION)
        for cell, outcomes in swept.items()
        for factor in outcomes
    ]
    jobs = list(dict.fromkeys(jobs))
    if training:
        store.run(jobs, num_processes=training)
    done = [job for job in jobs if job in store]
    print(f"{len(done)} of {len(jobs)} trainings, {store.seconds(done):.0f} core seconds")
    if arguments.do == "pack":
        store.pack(done, ARCHIVE)
        return
    page = all_tables(asked, store, swept, best)
    print(page)
    store.folder.mkdir(parents=True, exist_ok=True)
    (store.folder / "tables.md").write_text(page)


if __name__ == "__main__":
    main()
