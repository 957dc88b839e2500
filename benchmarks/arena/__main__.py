"""The arena: compare every clip rule with GAPO, on tasks small enough for hundreds of seeds.

    python -m benchmarks.arena              train what is missing, then report
    python -m benchmarks.arena match        scale the widths of all rules, in arena/scales.json
    python -m benchmarks.arena report       tables and figures of the trainings in the folder

docs/arena.md has the questions, the rules of analysis, and the answers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.arena.arms import CHUNKS, questions, read_scales
from benchmarks.arena.jobs import Job, run, seconds
from benchmarks.arena.match import match
from benchmarks.arena.report import report


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arena",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", nargs="?", default="run", choices=["run", "match", "report"])
    parser.add_argument("--folder", type=Path, default=Path("runs/arena"))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.do == "match":
        match(num_processes=arguments.processes)
        return
    asked = questions(read_scales())
    if arguments.do == "run":
        jobs = [
            Job(setting, chunk)
            for question, arms in asked.items()
            for chunk in range(CHUNKS[question])
            for setting in arms.values()
        ]
        run(jobs, arguments.folder, num_processes=arguments.processes)
        print(f"{seconds(jobs, arguments.folder):.0f} core seconds of training in total")
    report(asked, arguments.folder)


if __name__ == "__main__":
    main()
