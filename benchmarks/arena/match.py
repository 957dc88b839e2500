"""Scale every rule's widths until its clip removes as much gradient mass as `gspo_asym`'s."""

from __future__ import annotations

import json
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.arena.arms import (
    OVER_LENGTH,
    PILOT,
    RATE,
    SCALED,
    SCALES,
    method_of,
    read_scales,
    scaled,
)
from benchmarks.arena.train import Setting, train
from gapo_megatron.objective import METHODS, Method
from gapo_megatron.objective.diagnostics import SUMS

NUM_STEPS = 100
TOLERANCE = 5e-3
LARGEST_FACTOR = 1e3
MOST_TRIALS = 14
UNMATCHED, LIKE = ("cispo",), "dapo"
"""Rules that bound a weight never remove that much; they get the factor of `LIKE`."""


def match(*, num_processes: int) -> dict[str, float]:
    """Find the factors that `SCALES` lacks; "gapo" is the factor of arm `gapo_matched`."""
    torch.set_num_threads(1)
    target = mass_lost(METHODS["gspo_asym"])
    print(f"gspo_asym removes {target:.4f} of the gradient mass", flush=True)
    known = read_scales() if SCALES.exists() else {}
    wanted = ["gapo", *(name for name in SCALED if name not in UNMATCHED), OVER_LENGTH]
    names = [name for name in wanted if name not in known]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        found = dict(zip(names, pool.map(_find, names, [target] * len(names)), strict=True))
    found = known | found
    found |= {name: found[LIKE] for name in UNMATCHED}
    factors = {name: factor for name, factor in found.items() if factor is not None}
    if missing := found.keys() - factors.keys():
        raise SystemExit(
            f"no factor makes {', '.join(missing)} remove the share that gspo_asym does"
        )
    SCALES.write_text(json.dumps(factors, indent=1) + "\n")
    return factors


def mass_lost(method: Method, *, over_length: bool = False) -> float:
    """Share of gradient mass that the clip removes in the second half of a short training."""
    setting = Setting(
        method=method, learning_rate=RATE, num_steps=NUM_STEPS, over_length=over_length
    )
    late = train(setting, PILOT, evaluate_every=NUM_STEPS).per_c[1].sum(dim=(1, 2))
    return float(late[SUMS.index("gradient_mass_lost")] / late[SUMS.index("gradient_mass")])


def _find(name: str, target: float) -> float | None:
    """Bisect the factor's logarithm (wider clips remove less); None if no factor is close."""
    torch.set_num_threads(1)
    low, high = -math.log(LARGEST_FACTOR), math.log(LARGEST_FACTOR)
    for _ in range(MOST_TRIALS):
        middle = (low + high) / 2
        method = scaled(METHODS[method_of(name)], math.exp(middle))
        lost = mass_lost(method, over_length=name == OVER_LENGTH)
        print(f"{name}: {lost:.4f} at {math.exp(middle):.4g} times its widths", flush=True)
        if abs(lost - target) < TOLERANCE:
            return round(math.exp(middle), 4 - math.floor(middle / math.log(10)))
        low, high = (middle, high) if lost > target else (low, middle)
    return None
