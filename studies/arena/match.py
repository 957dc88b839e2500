"""Scale every rule's widths until its clip removes as much gradient mass as `gspo_asym`'s."""

from __future__ import annotations

import json
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from gapo_megatron.objective import METHODS
from gapo_megatron.objective.diagnostics import SUMS
from studies.arena.arms import (
    MATCHED_ON_TRANSFORMER,
    ON_TRANSFORMER,
    OVER_LENGTH,
    PILOT,
    RATE,
    SCALED,
    SCALES,
    TRANSFORMER_RATE,
    method_of,
    read_scales,
    scaled,
)
from studies.arena.train import QUARTERS, Setting, train

WALKS = ""
"""End of the name of a factor that is found on the walks."""
NUM_STEPS = {WALKS: 100, ON_TRANSFORMER: 40}
SEEDS = {WALKS: PILOT, ON_TRANSFORMER: PILOT[:16]}
TOLERANCE = {WALKS: 5e-3, ON_TRANSFORMER: 1e-2}
LARGEST_FACTOR = 1e3
MOST_TRIALS = 14
UNMATCHED, LIKE = ("cispo",), "dapo"
"""Rules that bound a weight never remove that much; they get the factor of `LIKE`."""


def match(*, num_processes: int) -> dict[str, float]:
    """Find the factors that `SCALES` lacks; "gapo" is the factor of arm `gapo_matched`."""
    torch.set_num_threads(1)
    known = read_scales() if SCALES.exists() else {}
    wanted = ["gapo", *(name for name in SCALED if name not in UNMATCHED), OVER_LENGTH]
    wanted += [f"{name}{ON_TRANSFORMER}" for name in MATCHED_ON_TRANSFORMER]
    names = [name for name in wanted if name not in known]
    ends = dict.fromkeys(_policy(name) for name in names)
    targets = {end: mass_lost(f"gspo_asym{end}") for end in ends}
    for end, target in targets.items():
        print(f"gspo_asym{end} removes {target:.4f} of the gradient mass", flush=True)
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        factors_found = pool.map(_find, names, [targets[_policy(name)] for name in names])
        found = dict(zip(names, factors_found, strict=True))
    found = known | found
    found |= {name: found[LIKE] for name in UNMATCHED}
    factors = {name: factor for name, factor in found.items() if factor is not None}
    if missing := found.keys() - factors.keys():
        raise SystemExit(
            f"no factor makes {', '.join(missing)} remove the share that gspo_asym does"
        )
    SCALES.write_text(json.dumps(factors, indent=1) + "\n")
    return factors


def _policy(name: str) -> str:
    """The part of a factor's name that says which policy it is for."""
    return ON_TRANSFORMER if name.endswith(ON_TRANSFORMER) else WALKS


def mass_lost(name: str, factor: float = 1.0) -> float:
    """Share of gradient mass that a clip removes in the second half of a short training.

    `name` is that of a factor; widths are `factor` times the method's.
    """
    policy = _policy(name)
    setting = Setting(
        method=scaled(METHODS[method_of(name)], factor),
        learning_rate=RATE if policy == WALKS else TRANSFORMER_RATE,
        num_steps=NUM_STEPS[policy],
        over_length=name == OVER_LENGTH,
        policy="walks" if policy == WALKS else "transformer",
    )
    per_c = train(setting, SEEDS[policy], evaluate_every=setting.num_steps).per_c
    late = per_c[QUARTERS // 2 :].sum(dim=(0, 2, 3))
    return float(late[SUMS.index("gradient_mass_lost")] / late[SUMS.index("gradient_mass")])


def _find(name: str, target: float) -> float | None:
    """Bisect the factor's logarithm (wider clips remove less); None if no factor is close."""
    torch.set_num_threads(1)
    low, high = -math.log(LARGEST_FACTOR), math.log(LARGEST_FACTOR)
    for _ in range(MOST_TRIALS):
        middle = (low + high) / 2
        lost = mass_lost(name, math.exp(middle))
        print(f"{name}: {lost:.4f} at {math.exp(middle):.4g} times its widths", flush=True)
        if abs(lost - target) < TOLERANCE[_policy(name)]:
            return round(math.exp(middle), 4 - math.floor(middle / math.log(10)))
        low, high = (middle, high) if lost > target else (low, middle)
    return None
