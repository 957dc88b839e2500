"""Show what a model did in a run, token by token: a page in one file, or a live one.

The page needs nothing but the run's files, and no network: prompts by pass rate, the answers to one
side by side with verdict, advantage, ratio and clip bounds, each token coloured by its log-ratio,
by the difference between trainer and engine, by policy version, or by who wrote it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

EXAMPLES = """\
the newest look at a run:     .venv/bin/python tools/view.py runs/demo         # runs/demo/view.html
some of its steps:            .venv/bin/python tools/view.py runs/demo --steps 10:20
while it trains:              .venv/bin/python tools/view.py runs/demo --live
from a cluster's login node:  ssh -L 8787:127.0.0.1:8787 LOGIN, there --live --port 8787

metrics.samples_per_step says how many answers a step keeps: as many as a group has, or more, show
whole groups; "all" keeps every answer. docs/metrics.md explains each number.
Exit codes: 0 done; 1 no run, no samples or damaged files; 2 wrong arguments.
"""


def main(command_line: Sequence[str] | None = None) -> int:
    """Write or serve the page; 0 done, 1 nothing to show or damaged files, 2 usage."""
    arguments = _parse(command_line)
    from gapo_megatron.errors import GapoError
    from gapo_tools.viewer.server import await_first_step, render, serve, write

    errors = Console(stderr=True, markup=False)
    first, last = arguments.steps
    try:
        if arguments.live:
            await_first_step(arguments.run)
            render(arguments.run, first=first, last=last)  # an error here, not in the browser
            serve(arguments.run, port=arguments.port, first=first, last=last)
        else:
            page = write(arguments.run, arguments.output, first=first, last=last)
            print(f"page: {page}")
    except GapoError as error:
        errors.print(f"error: {error}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _parse(command_line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run (run.output_dir)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.html", help="default: view.html in RUN"
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default=(0, None),
        metavar="A:B",
        help="show steps A to B, both included; either may be left out (default: as many as the "
        "page has room for, from the first to the newest)",
    )
    parser.add_argument(
        "--live", action="store_true", help="serve the page on 127.0.0.1 until Ctrl-C, and renew it"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="of --live (default: any that is free)"
    )
    arguments = parser.parse_args(command_line)
    if arguments.live and arguments.output:
        parser.error("--output does not go with --live, which writes no file")
    if arguments.port is not None and not arguments.live:
        parser.error("--port goes with --live")
    if arguments.port is not None and not 0 < arguments.port < 2**16:
        parser.error(f"--port ({arguments.port}) must be from 1 to 65535")
    return arguments


def _steps(text: str) -> tuple[int, int | None]:
    """Read `A:B`."""
    found = re.fullmatch(r"(\d*):(\d*)", text)
    first, last = (int(one) if one else None for one in found.groups()) if found else (1, 0)
    if last is not None and (first or 0) > last:
        raise argparse.ArgumentTypeError(f"{text!r} must be A:B, two steps, A not after B")
    return first or 0, last


if __name__ == "__main__":
    sys.exit(main())
