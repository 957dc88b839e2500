"""The valid layouts of a config on a number of nodes, with predicted memory and time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gapo_megatron.config import Config, ParallelConfig
from gapo_megatron.config.counts import check_world_size, num_generation_ranks
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.checks import check_engine_heads, check_replay, check_shapes, num_experts
from gapo_megatron.models.fp8 import check_capability
from gapo_megatron.models.lora import check_adapter
from gapo_megatron.models.published import find_model
from gapo_tools.planner.hardware import Gpu
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import Memory, find_refusal, memory
from gapo_tools.planner.times import StepTime, step_time
from gapo_tools.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its predicted memory and times."""

    layout: Layout
    memory: Memory
    times: StepTime


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `plan`."""

    gpu: Gpu
    num_gpus: int
    ranked: list[Candidate]
    """Layouts that fit, quickest first."""
    current: Candidate | None
    """The config's own layout, whether or not it fits; None: see `current_refusal`."""
    current_refusal: str
    """Why the config's own layout does not run; empty if it does."""
    refusals: Counter[str]
    """Number of layouts that do not run, by reason."""


def plan(hf_config: Any, config: Config, *, num_nodes: int, gpu: Gpu, workload: Workload) -> Plan:
    """Predict memory and time of every valid layout on `num_nodes` full nodes.

    Varied are tensor, pipeline and expert parallelism, recomputation, and the engine's tensor
    parallelism. Tensor parallelism stays within a node, with sequence parallelism wherever it is
    used; pipeline stages are equal, one per rank. All other settings are the config's: micro-batch,
    context parallelism, generation nodes, `rollout.memory_fraction`, offloading.

    Args:
        hf_config: the model's config.
        config: the run's settings.
        num_nodes: nodes of `gpu.gpus_per_node` devices.
        gpu: device.
        workload: lengths of a step.

    Raises:
        ConfigError: num_nodes is not positive, the device does not support the config's fp8, no
            layout can run this model, or no node is left to train.
    """
    if num_nodes < 1:
        raise ConfigError(f"nodes ({num_nodes}) must be 1 or more")
    check_capability(config.model, gpu.compute_capability, device=gpu.name)
    check_shapes(hf_config, ParallelConfig(), config.model)
    num_gpus = num_nodes * gpu.gpus_per_node
    num_generation = num_generation_ranks(
        config.rollout, world_size=num_gpus, ranks_per_node=gpu.gpus_per_node
    )

    ranked: list[Candidate] = []
    refusals: Counter[str] = Counter()
    for layout in _layouts(hf_config, config, num_gpus - num_generation, gpu):
        layout = replace(layout, num_generation=num_generation)
        try:
            _check(hf_config, layout.apply(config), layout, gpu)
        except ConfigError as error:
            refusals[str(error)] += 1
            continue
        for recompute in ("none", "selective", "full"):
            candidate = _predict(
                hf_config, config, replace(layout, recompute=recompute), gpu, workload
            )
            if refusal := find_refusal(candidate.memory, candidate.layout, gpu):
                refusals[refusal] += 1
            else:
                ranked.append(candidate)
    ranked.sort(key=lambda one: one.times.total_s)

    current, reason = None, ""
    try:
        layout = Layout.of(
            config, world_size=num_gpus - num_generation, num_generation=num_generation
        )
        _check(hf_config, config, layout, gpu)
    except ConfigError as error:
        reason = str(error)
    else:
        current = _predict(hf_config, config, layout, gpu, workload)
        reason = find_refusal(current.memory, layout, gpu)
    return Plan(gpu, num_gpus, ranked, current, reason, refusals)


def _layouts(hf_config: Any, config: Config, num_gpus: int, gpu: Gpu) -> Iterator[Layout]:
    """Layouts of `num_gpus` training GPUs whose sizes divide the node, the layers, the experts."""
    cp_size, in_node = config.parallel.context_parallel_size, _divisors(gpu.gpus_per_node)
    stages, ranks = _divisors(hf_config.num_hidden_layers), _divisors(num_experts(hf_config) or 1)
    for tp_size, pp_size, ep_size, engine in itertools.product(in_node, stages, ranks, in_node):
        dp_size, rest = divmod(num_gpus, tp_size * pp_size * cp_size)
        if not rest and num_gpus // pp_size % ep_size == 0:
            yield Layout(
                tp_size=tp_size,
                pp_size=pp_size,
                cp_size=cp_size,
                dp_size=dp_size,
                ep_size=ep_size,
                sequence_parallel=tp_size > 1,
                recompute="none",
                rollout_tp_size=engine,
            )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _check(hf_config: Any, config: Config, layout: Layout, gpu: Gpu) -> None:
    """Raise ConfigError where the trainer or vLLM would refuse the layout."""
    check_shapes(hf_config, config.parallel, config.model)
    check_adapter(hf_config, config.adapter, config.parallel)
    check_world_size(config.parallel, layout.world_size)
    size = layout.rollout_tp_size
    check_engine_heads(hf_config, size)
    if size > gpu.gpus_per_node or layout.rollout_ranks % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size ({size}) must be at most the GPUs of a node "
            f"({gpu.gpus_per_node}) and divide the GPUs that generate ({layout.rollout_ranks})"
        )


def _predict(
    hf_config: Any, config: Config, layout: Layout, gpu: Gpu, workload: Workload
) -> Candidate:
    needed = memory(hf_config, config, layout, gpu)
    return Candidate(layout, needed, step_time(hf_config, config, layout, workload, gpu))


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
