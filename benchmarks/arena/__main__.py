"""The arena: every clip rule beside GAPO, on tasks small enough to tell them apart.

    python -m benchmarks.arena              train what is missing, then draw and print the tables
    python -m benchmarks.arena match        scale the widths of all rules (benchmarks/arena/scales.json)
    python -m benchmarks.arena power        how many seeds it takes to resolve a difference
    python -m benchmarks.arena report       tables and figures of what is there

docs/arena.md has the questions, the rules fixed beforehand, and the answers.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.arena.arms import CHUNKS, questions, read_scales
from benchmarks.arena.jobs import Job, run, seconds
from benchmarks.arena.match import match
from benchmarks.arena.power import power
from benchmarks.arena.report import report


def main() -> None:
    """Do what the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arena",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", nargs="?", default="run", choices=["run", "match", "power", "report"])
    parser.add_argument("--folder", type=Path, default=Path("runs/arena"))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.do == "match":
        match(num_processes=arguments.processes)
        return
    if arguments.do == "power":
        power()
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
        print(f"{seconds(jobs, arguments.folder):.0f} core seconds of training in all")
    report(asked, arguments.folder)


if __name__ == "__main__":
    main()
