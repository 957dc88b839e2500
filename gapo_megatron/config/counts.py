"""Numbers of processes, stages and prompts that a config implies: plain arithmetic, no torch."""

from __future__ import annotations

import math

from gapo_megatron.config import BatchConfig, ParallelConfig, RolloutConfig
from gapo_megatron.errors import ConfigError


def num_begun(batch: BatchConfig, wanted: int) -> int:
    """Prompts to begin for `wanted` groups."""
    # 50 x 1.1 is 55.00000000000001 in binary.
    return math.ceil(round(wanted * batch.oversampling, 6))


def num_generation_ranks(rollout: RolloutConfig, *, world_size: int, ranks_per_node: int) -> int:
    """Ranks at the end of the job that only generate; 0: every rank trains and generates.

    Raises:
        ConfigError: no rank would be left to train, or the nodes do not have equally many ranks.
    """
    if nodes := rollout.generation_nodes:
        if world_size % ranks_per_node:
            raise ConfigError(
                f"rollout.generation_nodes ({nodes}) needs equally many ranks on every node: the "
                f"world size ({world_size}) is no multiple of {ranks_per_node}"
            )
        if nodes * ranks_per_node >= world_size:
            raise ConfigError(
                f"rollout.generation_nodes ({nodes}) must be below the job's "
                f"{world_size // ranks_per_node} node(s): the others train"
            )
        return nodes * ranks_per_node
    if rollout.generation_ranks >= world_size:
        raise ConfigError(
            f"rollout.generation_ranks ({rollout.generation_ranks}) must be below the world size "
            f"({world_size}): the other ranks train"
        )
    return rollout.generation_ranks


def layers_of_stages(config: ParallelConfig, num_layers: int) -> list[list[range]]:
    """Layers of each pipeline rank, by virtual stage.

    A model goes through the first virtual stage of every rank, then through the second, and so on.

    Raises:
        ConfigError: names the sizes that do not divide the layers.
    """
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    ends = {
        0: ("num_layers_in_first_pipeline_stage", config.num_layers_in_first_pipeline_stage),
        pp - 1: ("num_layers_in_last_pipeline_stage", config.num_layers_in_last_pipeline_stage),
    }
    given = {rank: (name, count) for rank, (name, count) in ends.items() if count is not None}
    rest = num_layers - sum(count for _, count in given.values())
    num_others = pp - len(given)
    if not given and num_layers % pp:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size ({pp}) must divide the model's "
            f"num_hidden_layers ({num_layers})"
        )
    if rest < num_others or (rest % num_others if num_others else rest):
        shown = " and ".join(f"parallel.{name} ({count})" for name, count in given.values())
        raise ConfigError(
            f"{shown} must leave a multiple of {num_others} of the model's num_hidden_layers "
            f"({num_layers}) for the other pipeline ranks, not {rest}"
        )
    counts = [given[rank][1] if rank in given else rest // max(num_others, 1) for rank in range(pp)]
    for rank, count in enumerate(counts):
        if count % vpp:
            raise ConfigError(
                f"parallel.virtual_pipeline_model_parallel_size ({vpp}) must divide the {count} "
                f"layers of pipeline rank {rank}"
            )
    stages: list[list[range]] = [[] for _ in counts]
    start = 0
    for _ in range(vpp):
        for rank, count in enumerate(counts):
            stages[rank].append(range(start, start + count // vpp))
            start += count // vpp
    return stages


def check_world_size(config: ParallelConfig, world_size: int) -> None:
    """Raise ConfigError unless the parallel sizes divide the number of processes, and fit."""
    if world_size < 1:
        raise ConfigError(f"the world size ({world_size}) must be at least 1")
    sizes = {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
    }
    tp, cp, ep, pp = sizes
    for names in ((tp, cp, pp), (ep, pp)):
        product = math.prod(sizes[name] for name in names)
        if world_size % product:
            shown = [f"parallel.{name} ({sizes[name]})" for name in names if sizes[name] > 1]
            raise ConfigError(
                f"the world size ({world_size}) must be a multiple of {' x '.join(shown)}"
                + (f" = {product}" if len(shown) > 1 else "")
            )
    sequence, experts = sizes[tp] * sizes[cp], sizes[ep]
    if sequence % experts and experts % sequence:
        # One of the two groups has to lie within the other: else ranks would enter the collectives
        # of the backward pass in different groups, and deadlock.
        raise ConfigError(
            f"of parallel.{ep} ({experts}) and parallel.{tp} x parallel.{cp} ({sequence}) one must "
            "divide the other"
        )


def bucket_size(num_copies: int) -> int:
    """Elements that fill a bucket of gradients.

    As Megatron-core's default, more where more ranks cut it.
    """
    return max(40_000_000, 1_000_000 * num_copies)
