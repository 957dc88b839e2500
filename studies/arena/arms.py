"""Arms of the arena by question; README.md gives the reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapo_megatron.objective import METHODS, Method
from studies.arena.train import Setting

SEEDS_PER_CHUNK = 64
CHUNKS = {
    "best": 2,
    "probes": 5,
    "aggregation": 5,
    "weights": 2,
    "proportional": 4,
    "transformer": 1,
    "transformer, x 4": 1,
    "transformer, dapo wider": 1,
    "transformer, stale": 1,
    "transformer, stale, x 4": 1,
}
"""Chunks of seeds per question; all questions start with the same seeds."""

RATE = 0.05
"""Learning rate of all arms, except in questions about it."""
RATES = (0.05, 0.1, 0.2)
STALENESS = 4
TRANSFORMER_RATE, TRANSFORMER_STEPS = 3e-4, 100

PAPER = ("gapo", "gspo", "gspo_asym", "f_gspo")
"""The paper's methods with a sequence ratio, whose own widths are multiplied by 1 at first."""
NEAREST = ("nsr", "atr", "abc", "ngrpo", "dgpo")
"""Rules of 2026, which only question 13 has (`nearest`)."""
SCALED = tuple(
    name
    for name, method in METHODS.items()
    if name not in (*PAPER, *NEAREST, "topr") and method.bounds == "fixed"
)
"""Rules whose widths are tuned for other models. Both widths are scaled by one factor, so that the
clip removes the same share of gradient mass as `gspo_asym`'s. Left out: `topr`, which has no
widths, and rules that find bounds over one mini-batch, because seeds are trained in one batch."""
OVER_LENGTH = "gapo_proportional, over length"
"""Name of a probe's factor: `gapo_proportional` with `Setting.over_length`."""
ON_TRANSFORMER = ", transformer"
"""End of the name of a factor that was found on the transformer."""
SCALES = Path(__file__).with_name("scales.json")
UNCLIPPED = replace(METHODS["gspo"], name="unclipped", eps_low=1 - 1e-9, eps_high_max=1e9)
WITHOUT_WIDTH = {"topr": METHODS["topr"], "unclipped": UNCLIPPED}


def scaled(method: Method, factor: float) -> Method:
    """Multiply all widths, the width of the noise and the mask's threshold by `factor`.

    eps_low stays below 1, and eps_low = 1 stays unbounded. ATR's widths are of r - 1 - ln r, which
    grows as the square of the ratio's distance from 1: they are multiplied by factor^2.
    """
    unbounded = method.eps_low == 1
    times = factor**2 if method.family == "atr" else factor
    others: dict[str, Any] = {
        name: value * factor
        for name in ("off_policy_mask", "eps_low_correct", "eps_high_wrong", "rescue_noise")
        if (value := getattr(method, name)) is not None
    }
    return replace(
        method,
        eps_low=1.0 if unbounded else min(method.eps_low * times, 1 - 1e-9),
        eps_high_max=method.eps_high_max * times,
        **others,
    )


def read_scales() -> dict[str, float]:
    """Factors by rule; README.md names the commit that found them."""
    scales: dict[str, float] = json.loads(SCALES.read_text())
    return scales


def questions(scales: Mapping[str, float]) -> dict[str, dict[str, Setting]]:
    """Arms by question and name, but those of the sweep; one that two share is trained once."""
    return {
        "probes": dict(_probes(scales)),
        "aggregation": dict(_aggregations(METHODS["gapo"])),
        "weights": dict(_weights(scales)),
        "proportional": dict(_proportional(scales)),
        "transformer": dict(_transformer(scales, 1)),
        "transformer, x 4": dict(_transformer(scales, 4)),
        "transformer, dapo wider": {
            "gapo": dict(_transformer(scales, 4))["gapo"],
            # As wide as four times the first widths on the walks.
            "dapo": dict(_transformer(scales, 16))["dapo"],
        },
        "transformer, stale": dict(_transformer(scales, 1, stale=True)),
        "transformer, stale, x 4": dict(_transformer(scales, 4, stale=True)),
    }


def setting_of(method: Method, **changes: object) -> Setting:
    """An arm of `method`, fresh and at the usual rate but for `changes`."""
    return replace(Setting(method=method, learning_rate=RATE), **changes)  # type: ignore[arg-type]


def _probes(scales: Mapping[str, float]) -> Iterator[tuple[str, Setting]]:
    """Wide clips for scarce groups, for all groups, and for abundant groups, at two rates."""
    methods = {name: METHODS[name] for name in ("gapo", "gspo_asym")}
    methods["gapo_matched"] = scaled(METHODS["gapo"], scales["gapo"])
    for rate in RATES[:2]:
        for name, method in methods.items():
            yield f"{name}, rate {rate:g}", setting_of(method, learning_rate=rate)
        turned = setting_of(METHODS["gapo"], learning_rate=rate, reversed_width=True)
        yield f"reversed, rate {rate:g}", turned


def _aggregations(gapo: Method) -> Iterator[tuple[str, Setting]]:
    """GAPO's clip with the aggregation or the advantages of `luspo` and `fspo`, or both."""
    yield "gapo", setting_of(gapo)
    summed = replace(gapo, aggregation="sequence_sum")
    yield "gapo, sum over tokens", setting_of(summed)
    yield "gapo, A / std", setting_of(replace(gapo, normalize_std=True))
    yield "gapo, both", setting_of(replace(summed, normalize_std=True))


def _weights(scales: Mapping[str, float]) -> Iterator[tuple[str, Setting]]:
    """Importance weights of stale batches, over rules and learning rates."""
    wide = replace(scaled(METHODS["dapo"], 4 * scales["dapo"]), name="dapo_wide")
    for method in (METHODS["gapo"], METHODS["gspo_asym"], wide, UNCLIPPED):
        for rate in RATES:
            for weights in ("none", "sequence", "token"):
                setting = setting_of(
                    method, learning_rate=rate, staleness=STALENESS, weights=weights
                )
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
    for rate in RATES[:2]:
        for advantages, change in changes.items():
            rest = f"rate {rate:g}, {advantages}"
            yield f"floor, {rest}", setting_of(replace(floor, **change), learning_rate=rate)
            yield f"proportional, {rest}", setting_of(replace(none, **change), learning_rate=rate)
            setting = setting_of(replace(length, **change), learning_rate=rate, over_length=True)
            yield f"over length, {rest}", setting
    for name, change in (
        ("fixed", {}),
        ("floor", {"adaptive": True}),
        ("proportional", {"adaptive": True, "has_floor": False}),
    ):
        method = replace(scaled(METHODS["sapo"], scales["sapo"]), **change)
        yield f"{name}, rate {RATE:g}, sapo", setting_of(method)


def _transformer(
    scales: Mapping[str, float], factor: float, *, stale: bool = False
) -> Iterator[tuple[str, Setting]]:
    """Rules on the transformer at `factor` times their first widths, and no clip."""
    names = ["gapo", "gspo_asym", "dapo"]
    if not stale:
        names += ["gspo", "gapo_proportional"]
    firsts = {name: scaled(METHODS[name], scales.get(name + ON_TRANSFORMER, 1)) for name in names}
    arms = {name: scaled(method, factor) for name, method in firsts.items()}
    arms["unclipped"] = UNCLIPPED
    if factor != 1:
        arms["gapo, x 1"] = firsts["gapo"]
    for name, method in arms.items():
        yield (
            name,
            Setting(
                method=method,
                learning_rate=TRANSFORMER_RATE,
                staleness=STALENESS if stale else 0,
                weights="none" if stale else "sequence",
                num_steps=TRANSFORMER_STEPS,
                policy="transformer",
            ),
        )
