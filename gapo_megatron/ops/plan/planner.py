"""Planner: the layouts of a model that fit on so many GPUs, the quickest first."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapo_megatron.config import Config, ParallelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.fp8 import check_capability
from gapo_megatron.models.published import find_model
from gapo_megatron.ops.plan.efficiency import Efficiency
from gapo_megatron.ops.plan.flops import Shape
from gapo_megatron.ops.plan.hardware import GIB, Gpu
from gapo_megatron.ops.plan.search import Candidate, Refusals, Search, quickest
from gapo_megatron.ops.plan.sides import find_splits, together
from gapo_megatron.ops.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `plan`."""

    gpu: Gpu
    num_gpus: int
    ranked: list[Candidate]
    """Candidates that fit and in which every rank trains and generates, quickest first; only the
    best settings of each trainer's layout."""
    current: Candidate | None
    """The config's own layout, whether or not it fits; None: see `current_refusal`."""
    current_refusal: str
    """Why the config's own does not run; empty: it does."""
    refusals: dict[str, Refusals] = field(default_factory=dict)
    """Why others of `ranked`'s kind do not run."""
    splits: list[Candidate] = field(default_factory=list)
    """Candidates that fit and in which the last nodes only generate, quickest first, of all numbers
    of such nodes that were tried (`sides.find_splits`)."""
    split_refusal: str = ""
    """Why no such split was tried; empty: some were, or there is one node."""

    @property
    def best(self) -> Candidate | None:
        """The quickest of all; None: nothing fits."""
        return next(iter(self.everything), None)

    @property
    def everything(self) -> list[Candidate]:
        """All that fit, of both kinds, quickest first."""
        return sorted([*self.ranked, *self.splits], key=quickest)

    @property
    def best_splits(self) -> list[Candidate]:
        """The quickest split of every number of generation nodes, quickest first."""
        found: dict[int, Candidate] = {}
        for candidate in self.splits:
            found.setdefault(candidate.layout.num_generation, candidate)
        return list(found.values())

    def gpu_hours(self, candidate: Candidate, num_steps: int) -> float:
        """GPU hours of so many steps."""
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

    Tensor parallelism stays within a node and, where it is used, sequence parallelism with it. More
    ranks share a sequence than the config asks for only where it does not fit otherwise.
    Micro-batches are tried from an eighth to four times the config's, but hold one sequence. Stages
    are equal, one to a rank; of virtual and unequal ones the config's own are shown. vLLM's share
    of the memory is the config's. With several nodes, splits into nodes that train and nodes that
    only generate are tried too (`sides.find_splits`).

    Args:
        hf_config: the model's.
        config: everything that is not planned.
        num_nodes: nodes of `gpu.gpus_per_node` devices.
        gpu: device.
        workload: lengths of a step.
        efficiency: what is reached of the device.
        max_staleness: of splits into nodes that train and nodes that only generate; None: the
            config's, and where the config's settings rule splits out, none is tried.

    Raises:
        ConfigError: num_nodes is not positive, the device does not run the config's fp8, no layout
            at all computes this model, or `max_staleness` is given and no split can have it.
    """
    if num_nodes < 1:
        raise ConfigError(f"nodes ({num_nodes}) must be 1 or more")
    check_capability(config.model, gpu.compute_capability, device=gpu.name)
    check_shapes(hf_config, ParallelConfig(), config.model)
    num_gpus = num_nodes * gpu.gpus_per_node
    parts = Shape.of(hf_config), config, gpu, workload, efficiency
    search = Search(hf_config, *parts)
    ranked, refusals = together(search).run(num_gpus)
    current, reason = search.current(num_gpus)
    wanted = config.rollout.max_staleness if max_staleness is None else max_staleness
    splits: list[Candidate] = []
    split_refusal = ""
    if num_nodes > 1 or max_staleness:
        try:
            splits = find_splits(search, num_nodes, max_staleness=wanted)
        except ConfigError as error:
            if max_staleness is not None:
                raise
            split_refusal = str(error)
    return Plan(
        gpu, num_gpus, ranked, current, reason, refusals, splits=splits, split_refusal=split_refusal
    )


def overrides(candidate: Candidate) -> list[str]:
    """Command-line overrides that give a run a candidate's settings.

    The config must not have the settings of `leave_out`.
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
    """Settings to remove from a config first: overrides cannot unset a number of layers."""
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    return [f"parallel.{name}" for name in names if getattr(config.parallel, name) is not None]


def gib(num_bytes: float) -> float:
    """Bytes in GiB."""
    return num_bytes / GIB


def read_model(config: Config) -> tuple[Any, str]:
    """The model of `model.hf_dir`: config.json alone, or shapes that are shipped.

    Returns:
        The model, and a sentence where it is not the folder's own; see
        `models.published.find_model`.

    Raises:
        ConfigError: it is not there, and how to get it alone; or it cannot be used.
    """
    folder = Path(config.model.hf_dir)
    is_absent = folder.is_dir() and not (folder / "config.json").is_file()
    model, note = (None, "") if is_absent else find_model(config.model.hf_dir)
    if model is None:
        raise ConfigError(
            f"model.hf_dir ({folder}): no config.json here. The planner needs that file alone: "
            f"copy it from where the model is, or `hf download ORGANISATION/{folder.name} "
            f"config.json --local-dir {folder}`"
        )
    return model, note
