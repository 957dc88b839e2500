"""`make test-gpu`: what this package does on this GPU, part by part.

Runs every test marked `gpu` and an acceptance of about ten minutes, in the order of what it tells,
each part in a process and a time limit of its own. What is done is kept, for this commit, device
and versions: the same command goes on where it was. Exit code: 0 if every part passed, or was left
out because something it needs is not installed; 1 if one did not pass; 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from tests.gpu import runner
from tests.gpu.parts import PARTS


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--output", type=Path, default=Path("runs/test_gpu"), help="%(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="%(default)s")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, as on a CPU: proves nothing"
    )
    options = parser.parse_args(arguments)
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    facts = runner.look(parts)
    if options.device == "cuda" and not facts["device"]:
        print(
            f"No GPU that PyTorch can use here: {facts['why']}.\nWhere there is one, this runs:\n"
        )
        for part in parts:
            absent = runner.missing(part, facts)
            print(f"  {part.name:18}{part.tells}{f' [{absent}]' if absent else ''}")
        return 2
    tiny = options.tiny or options.device == "cpu"
    about = runner.identity(facts if options.device == "cuda" else {"device": ""}, tiny=tiny)
    folder = options.output / runner.key(about)
    command = functools.partial(runner.part_command, device=options.device, tiny=tiny)
    results = runner.run_parts(parts, facts, folder, command, again=options.again)
    print(f"\n{runner.write_summary(folder, about, results)}\nIn {folder}: results.json, table.md")
    return int(any(result["status"] not in ("passed", "missing") for result in results))


if __name__ == "__main__":
    sys.exit(main())
