"""Numbers of processes, stages and prompts that follow from a config; imports no torch."""

from __future__ import annotations

import math

from gapo_megatron.config import BatchConfig, Config, ParallelConfig, RolloutConfig
from gapo_megatron.errors import ConfigError

USUAL_RANKS_PER_NODE = 8
"""Ranks per node if nothing states their number: one per GPU of a usual node."""


def num_begun(batch: BatchConfig, wanted: int) -> int:
    """Number of prompts to start for `wanted` complete groups."""
    # 50 x 1.1 is 55.00000000000001 in binary.
    return math.ceil(round(wanted * batch.oversampling, 6))


def num_generation_ranks(rollout: RolloutConfig, *, world_size: int, ranks_per_node: int) -> int:
    """Number of ranks, the last ones, that only generate; 0: every rank trains and generates.

    Raises:
        ConfigError: no rank would train, or nodes have different numbers of ranks.
    """
    if nodes := rollout.generation_nodes:
        if world_size % ranks_per_node:
            raise ConfigError(
                f"rollout.generation_nodes ({nodes}) needs the same number of ranks on every node: "
                f"the world size ({world_size}) is not a multiple of {ranks_per_node}"
            )
        if nodes * ranks_per_node >= world_size:
            raise ConfigError(
                f"rollout.generation_nodes ({nodes}) must be below the number of nodes "
                f"({world_size // ranks_per_node}): the other nodes train"
            )
        return nodes * ranks_per_node
    if rollout.generation_ranks >= world_size:
        raise ConfigError(
            f"rollout.generation_ranks ({rollout.generation_ranks}) must be below the world size "
            f"({world_size}): the other ranks train"
        )
    return rollout.generation_ranks


def usual_ranks_per_node(world_size: int) -> int:
    """Ranks per node of a job if nothing states their number."""
    return max(1, min(world_size, USUAL_RANKS_PER_NODE))


def split_ranks(config: Config, *, world_size: int, ranks_per_node: int) -> tuple[int, int]:
    """Number of ranks that train, the first ones, and of those that only generate.

    Args:
        config: the run's config.
        world_size: all ranks of the job.
        ranks_per_node: ranks of the job on each node.

    Raises:
        ConfigError: no rank is left to train, or parallel sizes do not divide a side.
    """
    num_generation = num_generation_ranks(
        config.rollout, world_size=world_size, ranks_per_node=ranks_per_node
    )
    num_training = world_size - num_generation
    try:
        check_sides(config, num_training=num_training, num_generation=num_generation)
    except ConfigError as error:
        if not num_generation:
            raise
        raise ConfigError(
            f"{num_training} of {world_size} ranks train, {num_generation} of {world_size} "
            f"generate: {error}"
        ) from None
    return num_training, num_generation


def check_sides(config: Config, *, num_training: int, num_generation: int) -> None:
    """Raise ConfigError unless the parallel sizes divide the ranks of their side."""
    check_world_size(config.parallel, num_training)
    size = config.rollout.tensor_parallel_size
    if (num_generation or num_training) % size:
        whose = "generation ranks" if num_generation else "world size"
        raise ConfigError(
            f"rollout.tensor_parallel_size ({size}) must divide the {whose} "
            f"({num_generation or num_training})"
        )


def layers_of_stages(config: ParallelConfig, num_layers: int) -> list[list[range]]:
    """Layers of each pipeline rank, by virtual stage.

    Activations pass the first virtual stage of every rank, then the second, and so on.

    Raises:
        ConfigError: names the sizes that do not divide the layers.
    """
    # The ranks whose number of layers is given; the rest is shared evenly.
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
    # Layers by rank, then their order: virtual stage by virtual stage.
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
    """Raise ConfigError unless the parallel sizes divide the world size and fit each other."""
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
        # One group has to contain the other. Otherwise ranks enter the collectives of the backward
        # pass in different groups, and deadlock.
        raise ConfigError(
            f"parallel.{ep} ({experts}) must divide parallel.{tp} x parallel.{cp} ({sequence}), or "
            "be a multiple of it"
        )


def bucket_size(num_copies: int) -> int:
    """Elements of a gradient bucket: Megatron-core's default, which grows with the ranks."""
    return max(40_000_000, 1_000_000 * num_copies)
