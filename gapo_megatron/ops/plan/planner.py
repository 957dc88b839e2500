"""Planner: which layouts fit on a number of nodes, quickest first; a layout as a config file."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from gapo_megatron.config import Config, ParallelConfig, load_config, parse_config
from gapo_megatron.config.roles import flat
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.documents import open_file
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.io.toml_tree import sections_to_toml
from gapo_megatron.models.checks import check_replay, check_shapes
from gapo_megatron.models.fp8 import check_capability
from gapo_megatron.models.lora import check_adapter
from gapo_megatron.models.published import find_model
from gapo_megatron.ops.plan.flops import Shape
from gapo_megatron.ops.plan.hardware import GIB, Efficiency, Gpu
from gapo_megatron.ops.plan.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, received_bytes
from gapo_megatron.ops.plan.search import Candidate, Refusals, Search, quickest
from gapo_megatron.ops.plan.times import SidesTime
from gapo_megatron.ops.plan.workload import Workload

ROOMY_SHARE = 0.95
"""Largest predicted share of a GPU's memory in a layout that is written to a file: responses get
longer during training."""
MOST_FRACTION = 0.9
"""Largest `rollout.memory_fraction` of a GPU that only generates."""
_COARSE = 8
"""How many numbers of generation nodes are tried first, evenly spaced."""
_MARK = "Written by tools/plan.py --write; NOT YET RUN."


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `plan`."""

    gpu: Gpu
    num_gpus: int
    ranked: list[Candidate]
    """Colocated candidates that fit, quickest first: the best settings of each trainer layout."""
    current: Candidate | None
    """The config's own layout, whether or not it fits; None: see `current_refusal`."""
    current_refusal: str
    """Why the config's own layout does not run; empty if it does."""
    refusals: dict[str, Refusals] = field(default_factory=dict)
    """Colocated layouts that do not run, by reason."""
    splits: list[Candidate] = field(default_factory=list)
    """Candidates with generation nodes that fit, quickest first (`find_splits`)."""

    @property
    def best(self) -> Candidate | None:
        """The quickest candidate of all; None if nothing fits."""
        return next(iter(self.everything), None)

    @property
    def everything(self) -> list[Candidate]:
        """All candidates that fit, colocated and split, quickest first."""
        return sorted([*self.ranked, *self.splits], key=quickest)

    @property
    def best_splits(self) -> list[Candidate]:
        """The quickest split for every number of generation nodes, quickest first."""
        found: dict[int, Candidate] = {}
        for candidate in self.splits:
            found.setdefault(candidate.layout.num_generation, candidate)
        return list(found.values())

    def gpu_hours(self, candidate: Candidate, num_steps: int) -> float:
        """GPU hours of `num_steps` steps."""
        return candidate.times.total_s * num_steps * self.num_gpus / 3600


def plan(
    hf_config: Any,
    config: Config,
    *,
    num_nodes: int,
    gpu: Gpu,
    workload: Workload,
    efficiency: Efficiency,
    max_staleness: int | None = None,
) -> Plan:
    """Try every layout of the trainer and the engine on `num_nodes` full nodes.

    Tensor parallelism stays within a node, with sequence parallelism wherever it is used. Context
    parallelism beyond the config's is tried only where a layout does not fit without it.
    Micro-batches are tried from an eighth to four times the config's, but always hold one sequence.
    Pipeline stages are equal, one per rank; virtual and unequal stages appear only if the config
    has them. `rollout.memory_fraction` is the config's. With several nodes, splits into training
    and generation nodes are tried too (`find_splits`).

    Args:
        hf_config: the model's config.
        config: everything that is not planned.
        num_nodes: nodes of `gpu.gpus_per_node` devices.
        gpu: device.
        workload: lengths of a step.
        efficiency: share of the device's peaks that is reached.
        max_staleness: staleness of splits; None: the config's.

    Raises:
        ConfigError: num_nodes is not positive, the device does not support the config's fp8, no
            layout can run this model, or `max_staleness` is given and no split supports it.
    """
    if num_nodes < 1:
        raise ConfigError(f"nodes ({num_nodes}) must be 1 or more")
    check_capability(config.model, gpu.compute_capability, device=gpu.name)
    check_shapes(hf_config, ParallelConfig(), config.model)
    num_gpus = num_nodes * gpu.gpus_per_node

    # Colocated layouts, and the config's own.
    search = Search(hf_config, Shape.of(hf_config), config, gpu, workload, efficiency)
    off = ("rollout.generation_nodes", "rollout.generation_ranks", "rollout.max_staleness")
    ranked, refusals = _changed(search, dict.fromkeys(off, 0)).run(num_gpus)
    current, reason = search.current(num_gpus)

    splits: list[Candidate] = []
    if num_nodes > 1 or max_staleness:
        wanted = config.rollout.max_staleness if max_staleness is None else max_staleness
        splits = find_splits(search, num_nodes, max_staleness=wanted)
    return Plan(gpu, num_gpus, ranked, current, reason, refusals, splits=splits)


def find_splits(search: Search, num_nodes: int, *, max_staleness: int) -> list[Candidate]:
    """Splits of `num_nodes` into training and generation nodes that fit, quickest first.

    For each number of generation nodes, every trainer layout on the other nodes is tried with the
    best engine. Up to fifteen nodes all numbers are tried. For more nodes the numbers are `_COARSE`
    evenly spaced ones, then those around the best at half the distance, and so on.

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

    # Evenly spaced numbers first, then those around the best, at half the distance each time.
    step = max(1, num_nodes // _COARSE)
    for number in (1, *range(step, num_nodes, step)):
        look(number)
    while step > 1:
        step = (step + 1) // 2
        least_s = {
            number: min(one.times.total_s for one in candidates)
            for number, candidates in found.items()
            if candidates
        }
        if least_s:
            best = min(least_s, key=lambda number: least_s[number])
            look(best - step)
            look(best + step)
    return sorted((one for candidates in found.values() for one in candidates), key=quickest)


def sides_of(candidate: Candidate) -> SidesTime:
    """Times of a split.

    Raises:
        TypeError: the candidate is colocated.
    """
    if not isinstance(candidate.times, SidesTime):
        raise TypeError(f"{candidate.layout}: no generation ranks")
    return candidate.times


def memory_fraction(search: Search) -> float:
    """`rollout.memory_fraction` of a GPU that only generates, in hundredths: at most 0.9.

    It leaves room for communicators and buckets, and the 5 % of `roomy_candidates`.
    """
    needed = CONTEXT_BYTES + 4 * COMMUNICATOR_BYTES + received_bytes(search.shape, search.config)
    left = math.floor(100 * (ROOMY_SHARE - needed / search.gpu.memory_bytes)) / 100
    return max(0.01, min(MOST_FRACTION, left))


def overrides(candidate: Candidate) -> list[str]:
    """Command-line overrides that give a run the candidate's settings.

    Remove the settings that `leave_out` names from the config first.
    """
    layout = candidate.layout
    ends = {"first": layout.first_layers, "last": layout.last_layers}
    return [
        f"parallel.tensor_model_parallel_size={layout.tp_size}",
        f"parallel.pipeline_model_parallel_size={layout.pp_size}",
        f"parallel.context_parallel_size={layout.cp_size}",
        f"parallel.expert_model_parallel_size={layout.ep_size}",
        f"parallel.virtual_pipeline_model_parallel_size={layout.vpp_size}",
        *(
            f"parallel.num_layers_in_{end}_pipeline_stage={count}"
            for end, count in ends.items()
            if count is not None
        ),
        f"parallel.sequence_parallel={str(layout.sequence_parallel).lower()}",
        f"model.recompute={layout.recompute}",
        f"rollout.tensor_parallel_size={layout.rollout_tp_size}",
        f"batch.max_tokens_per_microbatch={candidate.max_tokens_per_microbatch}",
        *candidate.settings,
    ]


def leave_out(config: Config) -> list[str]:
    """Settings to remove from a config before `overrides`: an override cannot unset them."""
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    return [f"parallel.{name}" for name in names if getattr(config.parallel, name) is not None]


def gib(num_bytes: float) -> float:
    """Bytes in GiB."""
    return num_bytes / GIB


def read_model(config: Config) -> tuple[Any, str]:
    """The model's shape: from config.json in `model.hf_dir`, or one that the package ships.

    Returns:
        The model, and a sentence if it is a shipped one; see `models.published.find_model`.

    Raises:
        ConfigError: there is no config.json (the message says how to get it), or it is wrong; or
            the model has no such layers as `adapter.targets` names.
    """
    folder = Path(config.model.hf_dir)
    is_absent = folder.is_dir() and not (folder / "config.json").is_file()
    model, note = (None, "") if is_absent else find_model(config.model.hf_dir)
    if model is None:
        raise ConfigError(
            f"model.hf_dir ({folder}) has no config.json. The planner needs only that file: copy "
            f"it from the model, or run `hf download ORGANISATION/{folder.name} config.json "
            f"--local-dir {folder}`"
        )
    check_adapter(model, config.adapter)
    check_replay(model, config.objective)
    return model, note


def roomy_candidates(plan: Plan) -> list[Candidate]:
    """Candidates that leave 5 % of every GPU's memory free, quickest first."""
    most = ROOMY_SHARE * plan.gpu.memory_bytes
    return [
        one for one in plan.everything if max(one.memory.training, one.memory.generating) <= most
    ]


def quickest_with_room(plan: Plan) -> Candidate:
    """The quickest layout that leaves 5 % of every GPU's memory free.

    Raises:
        ConfigError: there is none.
    """
    for candidate in roomy_candidates(plan):
        return candidate
    raise ConfigError(f"no layout leaves 5 % of a {plan.gpu.name} free: plan with more nodes")


def check_layout_file(path: Path) -> None:
    """Raise ConfigError if `path` is a file that `write_layout` has not written."""
    if not os.path.lexists(path):
        return
    with naming(path), open_file(path) as file:
        is_ours = _MARK.encode() in file.readline(2**12)
    if not is_ours:
        raise ConfigError(
            f"--write ({path}) exists and was not written by tools/plan.py: choose another name"
        )


def write_layout(
    candidate: Candidate, path: Path, *, gpu: Gpu, base: Path, settings: Sequence[str]
) -> None:
    """Write a config file with the layout of `candidate`, based on the config that was planned.

    Args:
        candidate: a candidate of the plan of `base` with `settings`.
        path: the file; its folder exists.
        gpu: device that was planned for.
        base: the config that was planned.
        settings: `section.key=value` that replaced some of it.

    Raises:
        ConfigError: `base` has settings that a config based on it cannot unset.
    """
    found, planned = load_config(base), load_config(base, settings)
    if names := leave_out(planned):
        raise ConfigError(f"{base}: remove {' and '.join(names)}: the planned stages are equal")
    if planned.run.output_dir == found.run.output_dir:
        folder = PurePath(found.run.output_dir).with_name(path.stem)
        settings = [*settings, f"run.output_dir={folder}"]
    config = load_config(base, [*settings, *overrides(candidate)])

    # Only the settings that differ from the base.
    before = flat(found)
    sections: dict[str, dict[str, object]] = {}
    for name, value in flat(config).items():
        if value != before.get(name):
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value

    num_nodes = candidate.layout.num_ranks // gpu.gpus_per_node
    size = "eight" if gpu.gpus_per_node == 8 else str(gpu.gpus_per_node)
    nodes = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
    apart = config.rollout.generation_nodes
    who = f" ({apart} for generation)" if apart else ""
    model = PurePath(config.model.hf_dir).name
    longest = f"responses of up to {config.rollout.max_response_tokens:,} tokens"
    head = f"# {model} on {nodes} of {size} {gpu.name.upper()}{who}, {longest}. {_MARK}"
    name = os.path.relpath(base, path.parent)
    write_atomically(path, f'{head}\nbase = "{name}"\n\n{sections_to_toml(sections)}')


def _on(search: Search, num_nodes: int, number: int, max_staleness: int) -> list[Candidate]:
    """Layouts that fit with `number` generation nodes."""
    settings: dict[str, object] = {
        "rollout.generation_nodes": number,
        "rollout.generation_ranks": 0,
        "rollout.max_staleness": max_staleness,
        "rollout.memory_fraction": memory_fraction(search),
        "optimizer.offload": "none",
    }
    gpus_per_node = search.gpu.gpus_per_node
    apart, training = _changed(search, settings), (num_nodes - number) * gpus_per_node
    return apart.run(training, num_generation=number * gpus_per_node)[0]


def _changed(search: Search, settings: Mapping[str, object]) -> Search:
    """The search with other settings; those that differ become overrides of its candidates.

    Raises:
        ConfigError: the settings cannot be combined.
    """
    before = flat(search.config)
    changed = {name: value for name, value in settings.items() if before.get(name) != value}
    config = search.config
    if changed:
        tree = config.model_dump(mode="python", exclude_none=True)
        for name, value in changed.items():
            section, _, key = name.partition(".")
            tree[section][key] = value
        config = parse_config(tree, source="plan")
    return dataclasses.replace(
        search,
        config=config,
        settings=tuple(f"{name}={value}" for name, value in changed.items()),
        _generation_s={},
    )
