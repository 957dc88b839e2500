"""How many seeds it takes to resolve a difference, from seeds that no question uses."""

from __future__ import annotations

import math

import torch
from scipy import stats

from benchmarks.arena.arms import PILOT, questions, read_scales
from benchmarks.arena.jobs import EVALUATE_EVERY
from benchmarks.arena.outcomes import MARGINS, OUTCOMES, differences
from benchmarks.arena.train import train

CONFIDENCE, POWER = 0.95, 0.8
ARMS = ("gapo", "gspo_asym", "dapo", "sapo")


def power() -> None:
    """Train `ARMS` on the pilot's seeds, and print the seeds that each difference would take."""
    torch.set_num_threads(1)
    rules = questions(read_scales())["rules"]
    pilot = {name: train(rules[name], PILOT, evaluate_every=EVALUATE_EVERY) for name in ARMS}
    print("| GAPO minus | outcome | sd, points | margin | seeds, alone | seeds, one of all |")
    print("|---|---|---|---|---|---|")
    for name in ARMS[1:]:
        found = differences([pilot["gapo"]], [pilot[name]])
        for outcome in OUTCOMES:
            spread, margin = float(found[outcome].std()), MARGINS[outcome]
            numbers = [seeds_needed(spread, margin, num_tests=n) for n in (1, len(rules) - 1)]
            cells = [name, outcome, f"{spread:.2f}", f"{margin:g}", *map(str, numbers)]
            print(f"| {' | '.join(cells)} |")


def seeds_needed(spread: float, margin: float, *, num_tests: int) -> int:
    """Pairs of which a true difference of `margin` is resolved with probability `POWER`.

    Two-sided, each of `num_tests` tests at (1 - CONFIDENCE) / num_tests (Bonferroni). `spread` is
    the standard deviation of one pair's difference, in the unit of `margin`.
    """
    normal = stats.norm.ppf(1 - (1 - CONFIDENCE) / (2 * num_tests)) + stats.norm.ppf(POWER)
    return math.ceil((float(normal) * spread / margin) ** 2)
