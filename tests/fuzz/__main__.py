"""Damage what the package reads, thousands of times, and list what it does not refuse by name."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.dist import single_rank
from tests.fuzz.campaign import OUTCOMES, Finding, campaign
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run a campaign; 1 if it found anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="another one: other cases")
    parser.add_argument("--number", type=int, default=2000, help="cases (default 2000)")
    parser.add_argument("--case", type=int, help="the one that a finding names, with its --target")
    names = [one.name for one in TARGETS]
    parser.add_argument("--target", action="append", choices=names, help="this one alone, or some")
    arguments = parser.parse_args()
    chosen = [one for one in TARGETS if one.name in (arguments.target or names)]
    if arguments.case is not None and len(chosen) != 1:
        parser.error("--case goes with one --target: findings name both")
    began, console = time.monotonic(), Console(markup=False, stderr=True)
    outcomes: dict[str, Counter[str]] = {one.name: Counter() for one in chosen}
    findings: list[Finding] = []
    with single_rank(), campaign(chosen, seed=arguments.seed) as prepared:
        cases = list(prepared.cases(arguments.number))
        if arguments.case is not None:
            cases = [(chosen[0], arguments.case)]
        hidden = not console.is_terminal
        # Ctrl-C ends a long run with what it has found so far.
        with contextlib.suppress(KeyboardInterrupt):
            for target, number in track(cases, console=console, disable=hidden, transient=True):
                outcome, finding = prepared.run(target, number)
                outcomes[target.name][outcome] += 1
                if finding:
                    findings.append(finding)
                    print(f"\n{finding}", flush=True)
    seconds = time.monotonic() - began
    _print(outcomes, title=f"seed {arguments.seed}, {seconds:.0f} s")
    return int(bool(findings))


def _print(outcomes: dict[str, Counter[str]], *, title: str) -> None:
    console = Console(markup=False, width=None if sys.stdout.isatty() else 160)
    table = Table("input", "cases", *OUTCOMES, title=title)
    for name, found in [*outcomes.items(), ("all", sum(outcomes.values(), Counter()))]:
        table.add_row(name, str(found.total()), *(str(found[kind] or "") for kind in OUTCOMES))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
