"""Arms of the arena by question; docs/arena.md gives the reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.arena.train import Setting
from gapo_megatron.objective import METHODS, Method

SEEDS_PER_CHUNK = 64
CHUNKS = {
    "rules": 5,
    "stale rules": 3,
    "clip alone": 2,
    "rates": 2,
    "widths": 2,
    "probes": 5,
    "aggregation": 5,
    "weights": 2,
    "proportional": 4,
}
"""Chunks of seeds per question; all questions start with the same seeds."""
PILOT = range(1_000_000, 1_000_000 + SEEDS_PER_CHUNK)
"""Seeds used to scale widths and to estimate power, and nowhere else."""

RATE = 0.05
"""Learning rate of all arms, except in questions about it."""
RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
HIGH_RATES = RATES[2:]
STALENESS = 4
WIDTHS = (3.5e-3, 5e-3, 7e-3, 1e-2, 2e-2, 5e-2)
GROUP_SIZES = (4, 8, 16)

PAPER = ("gapo", "gspo", "gspo_asym", "f_gspo")
"""The paper's methods with a sequence ratio; they keep the paper's widths."""
SCALED = tuple(
    name
    for name, method in METHODS.items()
    if name not in (*PAPER, "topr") and method.bounds == "fixed"
)
"""Rules whose widths are tuned for other models. Both widths are scaled by one factor, so that the
clip removes the same share of gradient mass as `gspo_asym`'s. Left out: `topr`, which has no
widths, and rules that find bounds over one mini-batch, because seeds are trained in one batch."""
OVER_LENGTH = "gapo_proportional, over length"
"""Name of a probe's factor: `gapo_proportional` with `Setting.over_length`."""
SCALES = Path(__file__).with_name("scales.json")
UNCLIPPED = replace(METHODS["gspo"], name="unclipped", eps_low=1 - 1e-9, eps_high_max=1e9)


def scaled(method: Method, factor: float) -> Method:
    """Multiply both widths and the mask's threshold by `factor`; eps_low = 1 stays unbounded."""
    mask = method.off_policy_mask
    return replace(
        method,
        eps_low=method.eps_low * factor if method.eps_low < 1 else method.eps_low,
        eps_high_max=method.eps_high_max * factor,
        off_policy_mask=None if mask is None else mask * factor,
    )


def read_scales() -> dict[str, float]:
    """Factors by rule, found by `python -m benchmarks.arena match`."""
    scales: dict[str, float] = json.loads(SCALES.read_text())
    return scales


def method_of(name: str) -> str:
    """The method of a factor's name."""
    return name.partition(", ")[0]


def questions(scales: Mapping[str, float]) -> dict[str, dict[str, Setting]]:
    """Arms by question and name; an arm shared by two questions is trained once."""
    methods = {name: METHODS[name] for name in (*PAPER, "topr")}
    methods |= {name: scaled(METHODS[name], scales[name]) for name in SCALED}
    methods["unclipped"] = UNCLIPPED
    methods["gapo_matched"] = scaled(METHODS["gapo"], scales["gapo"])
    return {
        "rules": {name: _setting(method) for name, method in methods.items()},
        "stale rules": {
            name: _setting(method, staleness=STALENESS, around_sampler=True)
            for name, method in methods.items()
        },
        "clip alone": {name: _setting(_alone(method)) for name, method in methods.items()},
        "rates": dict(_rates()),
        "widths": dict(_widths()),
        "probes": {
            f"{name}, rate {rate:g}": setting
            for rate in (RATE, 2 * RATE)
            for name, setting in _probes(methods, rate).items()
        },
        "aggregation": dict(_aggregations(METHODS["gapo"])),
        "weights": dict(_weights(scales)),
        "proportional": dict(_proportional(scales)),
    }


def _setting(method: Method, **changes: object) -> Setting:
    return replace(Setting(method=method, learning_rate=RATE), **changes)  # type: ignore[arg-type]


def _alone(method: Method) -> Method:
    """The rule's clip with GAPO's aggregation and advantages."""
    return replace(method, aggregation="token_mean", normalize_std=False, focal_gamma=0.0)


def _rates() -> Iterator[tuple[str, Setting]]:
    """GAPO, the fixed clip and no clip, over learning rates and three kinds of staleness."""
    modes = {
        "fresh": {},
        "stale": {"staleness": STALENESS},
        "stale, around the sampler": {"staleness": STALENESS, "around_sampler": True},
    }
    for method in (METHODS["gapo"], METHODS["gspo_asym"], UNCLIPPED):
        for rate in RATES:
            for mode, changes in modes.items():
                setting = _setting(method, learning_rate=rate, **changes)
                yield f"{method.name}, rate {rate:g}, {mode}", setting


def _widths() -> Iterator[tuple[str, Setting]]:
    """Upper widths of GAPO and of the fixed clip, over group sizes."""
    for name in ("gapo", "gspo_asym"):
        for k in GROUP_SIZES:
            for width in WIDTHS:
                method = replace(METHODS[name], eps_high_max=width)
                yield f"{name}, k {k}, {width:g}", _setting(method, group_size=k)


def _probes(methods: Mapping[str, Method], rate: float) -> dict[str, Setting]:
    """Wide clips for scarce groups, for all groups, and for abundant groups."""
    arms = {name: methods[name] for name in ("gapo", "gapo_matched", "gspo_asym")}
    settings = {name: _setting(method, learning_rate=rate) for name, method in arms.items()}
    turned = _setting(methods["gapo"], learning_rate=rate, reversed_width=True)
    return settings | {"reversed": turned}


def _aggregations(gapo: Method) -> Iterator[tuple[str, Setting]]:
    """GAPO's clip with the aggregation or the advantages of `luspo` and `fspo`, or both."""
    yield "gapo", _setting(gapo)
    summed = replace(gapo, aggregation="sequence_sum")
    yield "gapo, sum over tokens", _setting(summed)
    yield "gapo, A / std", _setting(replace(gapo, normalize_std=True))
    yield "gapo, both", _setting(replace(summed, normalize_std=True))


def _weights(scales: Mapping[str, float]) -> Iterator[tuple[str, Setting]]:
    """Importance weights of stale batches, over rules and learning rates."""
    wide = replace(scaled(METHODS["dapo"], 4 * scales["dapo"]), name="dapo_wide")
    for method in (METHODS["gapo"], METHODS["gspo_asym"], wide, UNCLIPPED):
        for rate in HIGH_RATES:
            for weights in ("none", "sequence", "token"):
                setting = _setting(method, learning_rate=rate, staleness=STALENESS, weights=weights)
                yield f"{method.name}, rate {rate:g}, {weights}", setting


def _proportional(scales: Mapping[str, float]) -> Iterator[tuple[str, Setting]]:
    """Widths with GAPO's floor, without it, and over length, with three kinds of advantages."""
    floor = scaled(METHODS["gapo"], scales["gapo"])
    none = scaled(METHODS["gapo_proportional"], scales["gapo_proportional"])
    length = scaled(METHODS["gapo_proportional"], scales[OVER_LENGTH])
    changes = {
        "raw A": {},
        "A / std": {"normalize_std": True},
        "focal": {"focal_gamma": 1.0},
    }
    for rate in HIGH_RATES[:2]:
        for advantages, change in changes.items():
            rest = f"rate {rate:g}, {advantages}"
            yield f"floor, {rest}", _setting(replace(floor, **change), learning_rate=rate)
            yield f"proportional, {rest}", _setting(replace(none, **change), learning_rate=rate)
            setting = _setting(replace(length, **change), learning_rate=rate, over_length=True)
            yield f"over length, {rest}", setting
    for name, change in (
        ("fixed", {}),
        ("floor", {"adaptive": True}),
        ("proportional", {"adaptive": True, "has_floor": False}),
    ):
        method = replace(scaled(METHODS["sapo"], scales["sapo"]), **change)
        yield f"{name}, rate {RATE:g}, sapo", _setting(method)
