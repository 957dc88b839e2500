"""The process groups of a run. Only this module reads Megatron's `parallel_state`.

Everything else takes the groups as an argument; Megatron's own modules read the state that
`initialize` sets.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from gapo_megatron.compat import cpu, megatron
from gapo_megatron.config import ParallelConfig
from gapo_megatron.config.counts import check_world_size


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's tensor, pipeline, context, data and expert parallel groups."""

    tp_group: dist.ProcessGroup
    tp_rank: int
    tp_size: int
    pp_group: dist.ProcessGroup
    pp_rank: int
    pp_size: int
    vpp_size: int
    """Virtual stages of every pipeline rank."""
    cp_group: dist.ProcessGroup
    """Ranks that share every sequence (`policy.context`). They hold the same weights and reduce
    gradients together, like data-parallel ranks."""
    cp_rank: int
    cp_size: int
    dp_group: dist.ProcessGroup
    dp_rank: int
    dp_size: int
    dp_cp_group: dist.ProcessGroup
    """Ranks with the same weights: they sum gradients and shard the optimizer's state."""
    ep_group: dist.ProcessGroup
    """Tensor, context or data parallel neighbours, each with some of the experts, unsharded."""
    ep_rank: int
    ep_size: int
    expert_dp_rank: int
    """Number of this rank among those with the same experts."""
    rank: int
    world_size: int

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding, in its first virtual stage."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer, in its last virtual stage, and so log-probs."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_first_copy(self) -> bool:
        """Whether tp and cp rank are 0; all ranks of these groups hold the same losses."""
        return self.tp_rank == 0 and self.cp_rank == 0


def initialize(config: ParallelConfig) -> ParallelGroups:
    """Create the process groups; the default group must exist.

    Collectives: group creation, on every rank.

    Raises:
        ConfigError: the parallel sizes do not divide the world size, or see `megatron.check`.
    """
    megatron.check()
    world_size = dist.get_world_size()
    check_world_size(config, world_size)
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    vpp = config.virtual_pipeline_model_parallel_size
    # Experts are never split by tensor parallelism. Megatron-core's optional gloo groups are not
    # used.
    with cpu.device_scope():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=math.ceil(config.timeout_s / 60),
            create_gloo_process_groups=False,
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
        expert_dp_rank=parallel_state.get_expert_data_parallel_group().rank(),
        rank=dist.get_rank(),
        world_size=world_size,
    )


def schedule_groups() -> ProcessGroupCollection:
    """The groups that Megatron-core's schedules use unless they get a communicator."""
    return ProcessGroupCollection.use_mpu_process_groups(
        ["tp", "cp", "embd", "pos_embd", "pp", "dp", "dp_cp", "tp_dp_cp"]
    )


def destroy() -> None:
    """Destroy the groups, so that `initialize` can be called again; keeps the default group.

    Collectives: a barrier, on every rank.
    """
    # Megatron-core drops them without closing, and gloo's threads would poll 100 times a second.
    groups = megatron.groups_made()
    dist.barrier()  # closing a connection early would break a peer's last transfer
    parallel_state.destroy_model_parallel()
    while groups:
        dist.destroy_process_group(groups.pop())
    gc.collect()  # earlier models are cyclic garbage and hold groups
