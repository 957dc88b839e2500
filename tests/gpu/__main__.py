"""`make test-gpu`: what this package does on this GPU, part by part.

Runs every test marked `gpu` and an acceptance, in the order of what it tells, each part in a
process and a time limit of its own, in a slot of fifteen minutes. The head has a slot of its own:
`--only head`. What has passed is kept, for this commit, these sources, device and versions: the
same command goes on where it was. Exit code: 0 if every part passed, or was left out because
something that it alone needs is not there; 1 if one did not pass or was not run; 2 if there is no
GPU, torch does not import, or something that every part needs is not installed.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from pathlib import Path

from tests.gpu import runner
from tests.gpu.parts import PARTS


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument(
        "--minutes", type=float, default=14.5, help="of this command (%(default)s); 0: no end"
    )
    parser.add_argument("--again", action="store_true", help="also what has passed")
    parser.add_argument("--output", type=Path, default=Path("runs/test_gpu"), help="%(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="%(default)s")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, as on a CPU: proves nothing"
    )
    options = parser.parse_args(arguments)
    parts = [
        part
        for part in PARTS
        if part.name in (options.only or ()) or (not options.only and not part.has_own_slot)
    ]
    facts = runner.look(PARTS)
    if options.device == "cpu":
        facts["modules"].append("second GPU")  # a second process will do
    if facts["broken"]:
        print(f"{sys.executable} cannot run anything here: {facts['broken']}")
        return 2
    if absent := runner.absent_packages(facts):
        print(
            f"Every part needs {', '.join(absent)}, and this Python lacks it; with PyTorch there:\n"
            f"  {sys.executable} -m pip install {' '.join(absent)}"
        )
    if options.device == "cuda" and not facts["device"]:
        print(
            f"No GPU that PyTorch can use here: {facts['why']}.\nWhere there is one, this runs:\n"
        )
        for part in parts:
            lacks = runner.missing(part, facts)
            print(f"  {part.name:18}{part.tells}{f' [{lacks}]' if lacks else ''}")
    if absent or (options.device == "cuda" and not facts["device"]):
        return 2
    tiny = options.tiny or options.device == "cpu"
    about = runner.identity(facts if options.device == "cuda" else {"device": ""}, tiny=tiny)
    folder = options.output / runner.key(about)
    command = functools.partial(runner.part_command, device=options.device, tiny=tiny)

    def summary() -> str:
        return runner.write_summary(folder, about, runner.all_results(folder, facts))

    try:
        results = runner.run_parts(
            parts,
            facts,
            folder,
            command,
            again=options.again,
            slot_s=60 * options.minutes or math.inf,
            after=summary,
        )
    finally:  # also of a run that is ended
        print(f"\n{summary()}\nIn {folder}: results.json, table.md")
    return int(any(result["status"] not in ("passed", "missing") for result in results))


if __name__ == "__main__":
    runner.exit_on_signals()
    sys.exit(main())
