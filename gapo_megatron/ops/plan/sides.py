"""Splits of a cluster: the last nodes only generate, the others train."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from gapo_megatron.config import Config, parse_config
from gapo_megatron.config.roles import flat
from gapo_megatron.errors import ConfigError
from gapo_megatron.ops.plan.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, received_bytes
from gapo_megatron.ops.plan.search import Candidate, Search, quickest
from gapo_megatron.ops.plan.times import SidesTime

ROOMY_SHARE = 0.95
"""Largest predicted share of a GPU's memory that a layout may take: lengths grow in training."""
MOST_FRACTION = 0.9
"""Largest `rollout.memory_fraction` of a GPU that only generates."""
WEIGHT_MAX = 2.0
"""`objective.importance_weight_max` where batches are sampled ahead and the config has none."""
_COARSE = 8
"""So many numbers of generation nodes are tried first, evenly spaced; then those around the best,
each time at half the distance."""


def together(search: Search) -> Search:
    """The same search over layouts in which every rank trains and generates."""
    off = ("rollout.generation_nodes", "rollout.generation_ranks", "rollout.max_staleness")
    return _changed(search, dict.fromkeys(off, 0))


def find_splits(search: Search, num_nodes: int, *, max_staleness: int) -> list[Candidate]:
    """Splits of `num_nodes` that fit, quickest first.

    Of a number of generation nodes every layout of the trainer on the other nodes is tried, each
    with the best engine. All numbers are tried up to fifteen nodes; of more nodes those that
    `_COARSE` says, around the best at `max_staleness` and at 1, what a hint asks for.

    Raises:
        ConfigError: fewer than two nodes; the config's settings cannot be combined with generation
            nodes, or not at that staleness.
    """
    if num_nodes < 2:
        raise ConfigError(
            f"max_staleness ({max_staleness}) needs 2 nodes or more: some generate, others train"
        )
    found: dict[int, list[Candidate]] = {}

    def look(number: int) -> None:
        if 0 < number < num_nodes and number not in found:
            found[number] = _on(search, num_nodes, number, max_staleness)

    step = max(1, num_nodes // _COARSE)
    for number in (1, *range(step, num_nodes, step)):
        look(number)
    while step > 1:
        step = (step + 1) // 2
        for staleness in {max_staleness, max(1, max_staleness)}:
            fitting = [number for number, candidates in found.items() if candidates]
            if fitting:
                best = min(fitting, key=lambda number: _least_s(found[number], staleness))
                look(best - step)
                look(best + step)
    return sorted((one for candidates in found.values() for one in candidates), key=quickest)


def quickest_ahead(splits: Sequence[Candidate]) -> tuple[Candidate, float] | None:
    """The split that would be quickest if generation ran a step ahead, and seconds of its step.

    None where there is none, or where it does run ahead.
    """
    times = {one: sides_of(one) for one in splits}
    ahead = [
        dataclasses.replace(one, times=sides.at(1))
        for one, sides in times.items()
        if sides.max_staleness == 0
    ]
    best = min(ahead, key=quickest, default=None)
    return None if best is None else (best, best.times.total_s)


def sides_of(candidate: Candidate) -> SidesTime:
    """Times of a split.

    Raises:
        TypeError: every rank of the candidate trains and generates.
    """
    if not isinstance(candidate.times, SidesTime):
        raise TypeError(f"{candidate.layout}: no rank only generates")
    return candidate.times


def _least_s(candidates: list[Candidate], max_staleness: int) -> float:
    return min(sides_of(one).at(max_staleness).total_s for one in candidates)


def _on(search: Search, num_nodes: int, number: int, max_staleness: int) -> list[Candidate]:
    """Layouts that fit with so many generation nodes."""
    config, gpus_per_node = search.config, search.gpu.gpus_per_node
    settings: dict[str, object] = {
        "rollout.generation_nodes": number,
        "rollout.generation_ranks": 0,
        "rollout.max_staleness": max_staleness,
        "rollout.memory_fraction": memory_fraction(search),
        "optimizer.offload": "none",
    }
    objective = config.objective
    is_corrected = objective.importance_weight_max is not None
    if max_staleness and objective.old_log_probs == "trainer" and not is_corrected:
        settings["objective.importance_weight_max"] = WEIGHT_MAX
    apart = _changed(search, settings)
    training = (num_nodes - number) * gpus_per_node
    return apart.run(training, num_generation=number * gpus_per_node)[0]


def memory_fraction(search: Search) -> float:
    """VLLM's share of a GPU that only generates, in whole hundredths: at most 0.9.

    Beside communicators and buckets it leaves the twentieth that a layout written to a file has.
    """
    needed = CONTEXT_BYTES + 3 * COMMUNICATOR_BYTES + received_bytes(search.shape, search.config)
    left = math.floor(100 * (ROOMY_SHARE - needed / search.gpu.memory_bytes)) / 100
    return max(0.01, min(MOST_FRACTION, left))


def _changed(search: Search, settings: Mapping[str, object]) -> Search:
    """The search with other settings; those that differ become overrides of its candidates.

    Raises:
        ConfigError: the settings cannot be combined.
    """
    before = flat(search.config)
    changed = {name: value for name, value in settings.items() if before.get(name) != value}
    return dataclasses.replace(
        search,
        config=_with(search.config, changed),
        settings=tuple(f"{name}={value}" for name, value in changed.items()),
        _generation_s={},
    )


def _with(config: Config, settings: Mapping[str, object]) -> Config:
    tree = config.model_dump(mode="python", exclude_none=True)
    for name, value in settings.items():
        section, _, key = name.partition(".")
        tree[section][key] = value
    return parse_config(tree, source="plan") if settings else config
