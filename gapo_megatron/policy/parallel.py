"""The process groups of a run. The only reader of Megatron's `parallel_state`.

Everything else takes the groups as an argument (Megatron's own modules, called from this package,
read the state that `initialize` sets).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from gapo_megatron import cpu
from gapo_megatron.config import ParallelConfig
from gapo_megatron.errors import ConfigError


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place in the tensor, pipeline, context, data and expert parallel groups."""

    tp_group: dist.ProcessGroup
    tp_rank: int
    tp_size: int
    pp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    vpp_size: int
    """Virtual stages of every pipeline rank."""
    cp_group: dist.ProcessGroup
    """Ranks that share every sequence (`policy.context`); weights and gradients as of data
    parallel neighbours."""
    cp_rank: int
    cp_size: int
    dp_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int
    dp_cp_group: dist.ProcessGroup
    """Ranks with the same weights: they add up gradients and divide the optimizer's state."""
    ep_group: dist.ProcessGroup
    """Tensor, context or data parallel neighbours, each with a part of the experts, whole ones."""
    ep_rank: int
    ep_size: int
    rank: int
    world_size: int

    @property
    def is_first_stage(self) -> bool:
        """This rank embeds tokens: in its first virtual stage."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank's last virtual stage holds the head: log-probs and losses exist here only."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_first_copy(self) -> bool:
        """Of the ranks that hold the same losses (tensor and context parallel), the first one."""
        return self.tp_rank == 0 and self.cp_rank == 0


def initialize(config: ParallelConfig) -> ParallelGroups:
    """Create the process groups; the default group must be up.

    Collectives: group creation, on every rank.

    Raises:
        ConfigError: the parallel sizes do not divide the world size.
    """
    world_size = dist.get_world_size()
    check_world_size(config, world_size)
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size
    with cpu.device_scope():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=math.ceil(config.timeout_s / 60),
            # The optimizer's checkpoint format gathers over gloo (megatron-core 0.16).
            create_gloo_process_groups=True,
        )
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    cp_group = parallel_state.get_context_parallel_group()
    dp_group = parallel_state.get_data_parallel_group()
    ep_group = parallel_state.get_expert_model_parallel_group()
    return ParallelGroups(
        tp_group=tp_group,
        tp_rank=tp_group.rank(),
        tp_size=tp_group.size(),
        pp_group=pp_group,
        pp_rank=pp_group.rank(),
        pp_size=pp_group.size(),
        vpp_size=vpp,
        cp_group=cp_group,
        cp_rank=cp_group.rank(),
        cp_size=cp_group.size(),
        dp_group=dp_group,
        dp_rank=dp_group.rank(),
        dp_size=dp_group.size(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep_group=ep_group,
        ep_rank=ep_group.rank(),
        ep_size=ep_group.size(),
        rank=dist.get_rank(),
        world_size=world_size,
    )


def layers_of_stages(config: ParallelConfig, num_layers: int) -> list[list[range]]:
    """Which of the model's layers each pipeline rank has, by virtual stage.

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
        # A backward pass takes all of a rank's context and of its expert group: one of the two has
        # to lie within the other, or some would go back whom others do not wait for.
        raise ConfigError(
            f"of parallel.{ep} ({experts}) and parallel.{tp} x parallel.{cp} ({sequence}) one must "
            "divide the other"
        )


def destroy() -> None:
    """Forget the groups, so that `initialize` can be called again. The default group stays up."""
    parallel_state.destroy_model_parallel()
