"""Write a report on runs: one page (report.html), and every figure as PNG, PDF and CSV.

RUN is a run folder, or a folder of runs such as a study's. Runs that differ only in the seed are
drawn as one method: a line for their mean, a band for its interval. One method is compared with
each of the others. Runs that are still training are read up to their last step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.io.files import file_name

EXAMPLES = """\
one run:                    .venv/bin/python tools/report.py runs/demo
a study, gapo vs. the rest: .venv/bin/python tools/report.py runs/studies/demo --first gapo
two methods, elsewhere:     .venv/bin/python tools/report.py runs/a runs/b --output /tmp/a_and_b

The page needs no network. docs/metrics.md explains each figure.
Exit codes: 0 done; 1 a folder has no run or a damaged one; 2 wrong arguments.
"""


def main(command_line: Sequence[str] | None = None) -> int:
    """Write the report; 0 done, 1 nothing to report or damaged files, 2 usage."""
    arguments = _parse(command_line)
    # matplotlib and torch: seconds that --help does not need.
    from gapo_megatron.errors import GapoError
    from gapo_tools.reporting import write_report
    from gapo_tools.reporting.report import some

    errors = Console(stderr=True, markup=False)
    try:
        report = write_report(arguments.runs, arguments.output, first=arguments.first)
    except GapoError as error:
        errors.print(f"error: {error}", highlight=False, soft_wrap=True)
        return 1
    print(report.summary.to_text())
    if report.left_out:
        print("Figures and tables left out, because these runs have no data for them:")
        for title, reason in report.left_out.items():
            print(f"  {title}: {reason}")
        print()
    if report.waiting:
        print(f"no step trained yet: {some([str(folder) for folder in report.waiting])}")
    print(f"report: {report.page}")
    return 0


def _parse(command_line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="default: `report` in a single RUN; of several, a folder beside them with their names",
    )
    parser.add_argument(
        "--first",
        metavar="METHOD",
        help="compare this method with each other one (default: the first RUN's)",
    )
    arguments = parser.parse_args(command_line)
    if arguments.output is None:
        runs = [run.absolute() for run in arguments.runs]
        common = Path(os.path.commonpath(runs))
        if common == Path(common.anchor):
            parser.error("these RUNs have no common folder: give --output")
        # Other runs have another report: one must not replace the other's.
        names = ["_".join(run.relative_to(common).parts) or run.name for run in runs]
        arguments.output = common / (file_name("_vs_".join(names)) if runs[1:] else "report")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
