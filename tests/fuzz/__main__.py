"""Damage what the package reads, thousands of times, and list what it does not refuse by name."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter

from tests.dist import single_rank
from tests.fuzz.campaign import OUTCOMES, campaign
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
    outcomes: dict[str, Counter[str]] = {one.name: Counter() for one in chosen}
    num_found = 0
    with single_rank(), campaign(chosen, seed=arguments.seed) as prepared:
        cases = list(prepared.cases(arguments.number))
        if arguments.case is not None:
            cases = [(chosen[0], arguments.case)]
        # Ctrl-C ends a long run with what it has found so far.
        with contextlib.suppress(KeyboardInterrupt):
            for target, number in cases:
                outcome, finding = prepared.run(target, number)
                outcomes[target.name][outcome] += 1
                if finding:
                    num_found += 1
                    print(f"\n{finding}", flush=True)
    for name, found in outcomes.items():
        print(name, ", ".join(f"{found[kind]} {kind}" for kind in OUTCOMES if found[kind]))
    return int(num_found > 0)


if __name__ == "__main__":
    sys.exit(main())
