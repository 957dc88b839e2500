"""What REGISTRATION.md fixes, as code: arms, how widths are matched, how many pairs are run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from scipy import stats

ARMS = {
    "gapo": "gapo",
    "reversed": "studies/reversal/reversed.py:REVERSED",
    "fixed": "gspo_asym",
    "symmetric": "gspo",
}
"""Arm -> `objective.method`."""
JUDGED = ("gapo", "reversed", "fixed")
"""Arms of the primary differences; the others are run after them."""
NUM_STEPS, LATE = 40, (32, 36, 40)
"""Steps of a run, and the steps after which it is evaluated."""
K = 8
SEEDS = range(34)
"""Seeds of the pairs, in the order in which they are run."""
CALIBRATION_SEED, CALIBRATION_STEPS = 1000, 13
"""A seed that no pair has, and the first third of a run."""

CLIPPED, LOST = "clip/fraction_sequences", "clip/gradient_mass_lost"
LOST_CORRECT = "clip/positive_gradient_mass_lost"
DOSE = "clip/dose_decisions"
"""Share of decisions on correct responses that differ from the fixed clip's."""
LOST_SHARE, UPPER_OVER_LOWER = 0.20, 4.0
"""Share of the correct responses' gradient that GAPO's widths (e, 4e) remove."""
LEAST_DOSE = 0.05
"""Share of decisions below which there is no order of c to be seen."""
FIRST_WIDTH, MOST_WIDTHS = 0.02, 8
NEAR, NEAREST = 0.02, 0.03
"""Distance from a share at which the search ends, and from which it fails."""

LEAST_PAIRS, EFFECT = 6, 1.7
"""Pairs before the deviation is estimated; the difference in points that the study has to see."""
START_STEPS, START_MIXED = (160, 320), 0.5
"""Lengths of the supervised start, tried in this order, and the share of mixed groups it needs."""

Widths = dict[str, tuple[float, float]]
"""Arm -> `objective.eps_low`, `objective.eps_high_max`."""
Measure = Callable[[str, float, float], Mapping[str, float]]
"""Arm, lower and largest upper width -> means of `clip/*` over the steps of a calibration run."""


def mixed_share(probabilities: np.ndarray) -> float:
    """Expected share of groups of `K` in which some are correct and some wrong."""
    return float((1 - probabilities**K - (1 - probabilities) ** K).mean())


def find_width(lost: Callable[[float], float], *, target: float, first: float) -> float:
    """A width at which `lost`, which falls with it, is `NEAR` `target`.

    Interpolates in the width's logarithm between the nearest ones on both sides. `lost` has steps,
    a response each: after `MOST_WIDTHS` the one that came nearest.

    Raises:
        RuntimeError: none came within `NEAREST`; names them.
    """
    gap: dict[float, float] = {}
    width = first
    for _ in range(MOST_WIDTHS):
        width = float(f"{width:.4g}")
        gap[width] = lost(width) - target
        if abs(gap[width]) <= NEAR:
            return width
        narrow = max((one for one, more in gap.items() if more > 0), default=None)
        wide = min((one for one, more in gap.items() if more < 0), default=None)
        if narrow is None or wide is None:
            width = width * 2 if wide is None else width / 2
            continue
        part = gap[narrow] / (gap[narrow] - gap[wide])
        width = narrow * (wide / narrow) ** min(max(part, 0.2), 0.8)
    nearest = min(gap, key=lambda one: abs(gap[one]))
    if abs(gap[nearest]) > NEAREST:
        raise RuntimeError(f"no width within {NEAREST} of {target:.4f}; distances {gap}")
    return nearest


def calibrate(measure: Measure, *, num_processes: int) -> Widths:
    """Widths of all arms: GAPO's where a fifth of the correct rollouts' gradient is lost.

    Fixed and reversed clip have GAPO's lower width, and lose as much of the correct rollouts'
    gradient; the symmetric one has one width, and loses as much of everybody's.

    Raises:
        RuntimeError: a width is not found, or GAPO decides as the fixed clip does (`LEAST_DOSE`).
    """
    low = find_width(
        lambda width: measure("gapo", width, UPPER_OVER_LOWER * width)[LOST_CORRECT],
        target=LOST_SHARE,
        first=FIRST_WIDTH,
    )
    goal = measure("gapo", low, UPPER_OVER_LOWER * low)
    if goal[DOSE] < LEAST_DOSE:
        raise RuntimeError(f"of GAPO's decisions {goal[DOSE]:.3f} differ, not {LEAST_DOSE}")

    def match(arm: str) -> tuple[float, float]:
        key = LOST if arm == "symmetric" else LOST_CORRECT
        first = {"fixed": 2.0, "reversed": 4.0, "symmetric": 1.5}[arm] * low

        def lost(width: float) -> float:
            return measure(arm, width if arm == "symmetric" else low, width)[key]

        width = find_width(lost, target=goal[key], first=first)
        return (width if arm == "symmetric" else low), width

    others = [arm for arm in ARMS if arm != "gapo"]
    with ThreadPoolExecutor(num_processes) as pool:
        found = dict(zip(others, pool.map(match, others), strict=True))
    return {"gapo": (low, UPPER_OVER_LOWER * low), **found}


def blind_deviation(rates: np.ndarray) -> float:
    """Deviation of a difference of two arms of a pair, without a word on which arm is ahead.

    From what pair and arm leave of pass rates [pairs, arms], in points, pooled over arms.
    """
    pairs, arms = rates.shape
    rest = rates - rates.mean(axis=0) - rates.mean(axis=1, keepdims=True) + rates.mean()
    return math.sqrt(2 * float((rest**2).sum()) / ((pairs - 1) * (arms - 1)))


def detectable(deviation: float, pairs: int) -> float:
    """The true difference that `pairs` pairs find with a power of 80 % at 95 %, two-sided."""
    quantiles = stats.t.ppf([0.975, 0.8], df=pairs - 1).sum()
    return float(quantiles) * deviation / math.sqrt(pairs)


def pairs_needed(deviation: float) -> int:
    """Pairs that see `EFFECT`: `LEAST_PAIRS` at least, and as many as there are seeds at most."""
    enough = (
        pairs for pairs in range(LEAST_PAIRS, len(SEEDS)) if detectable(deviation, pairs) <= EFFECT
    )
    return next(enough, len(SEEDS))
