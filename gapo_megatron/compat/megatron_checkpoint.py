"""Undocumented parts of Megatron-core's checkpoints (`dist_checkpointing`) in use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

__all__ = [
    "CheckpointingException",
    "InProcessSave",
    "save_sharded",
    "sharded_factor",
    "sharded_tensors",
    "without_frozen",
]
# Of the first, a re-export.
# Uses: megatron.core.dist_checkpointing.core.CheckpointingException
# Versions: megatron-core 0.19.2
# Upstream: none found


def sharded_tensors(state: dict[str, Any]) -> Iterator[Any]:
    """Yield the sharded objects of a state dict that hold tensors (`data`)."""
    # Uses: dist_checkpointing.dict_utils.nested_values; ShardedTensor.data, ShardedTensorFactory
    # Versions: megatron-core 0.19.2
    # Upstream: none found (close to it NVIDIA/Megatron-LM#4475, open, #7013, closed)
    for one in nested_values(state):
        if isinstance(one, ShardedTensor | ShardedTensorFactory):
            yield one


def without_frozen(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a sharded state dict the parameters and buffers that are not trained."""
    # Uses: ShardedTensor.data, ShardedTensorFactory.data
    # Versions: megatron-core 0.19.2
    # Upstream: none found

    def is_frozen(one: Any) -> bool:
        data = getattr(one, "data", None)
        return isinstance(data, Tensor) and not data.requires_grad

    return {name: one for name, one in state.items() if not is_frozen(one)}


class InProcessSave(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves in Megatron-core's format by a writer of ours, in this process.

    Its own one writes in threads, but starts a process for the queue of their results.
    """

    # Uses: strategies.torch: _replace_state_dict_keys_with_sharded_keys, mcore_to_pyt_state_dict,
    #     MCoreSavePlanner, keep_only_main_replica, TorchDistSaveShardedStrategy as a base
    # Versions: megatron-core 0.19.2
    # Upstream: none found for another writer

    def __init__(self, writer: torch_checkpoint.FileSystemWriter) -> None:
        super().__init__(backend="torch_dist", version=1)
        self._writer = writer

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Save into the writer's folder, which is `checkpoint_dir`.

        Collectives, over all ranks: reduce-scatter of the plan, all-reduce of the results.
        """
        by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        torch_checkpoint.save(
            torch_strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=self._writer,
            planner=torch_strategies.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )


def save_sharded(
    state: dict[str, Any], group: dist.ProcessGroup, writer: torch_checkpoint.FileSystemWriter
) -> None:
    """Write a sharded state dict in the format `torch_dist`.

    Args:
        state: the same keys on every rank that holds them.
        group: ranks with equal weights; each writes a part of them.
        writer: this rank's. Its folder exists, is empty, and all ranks share it.

    Collectives, over all ranks: those of Megatron-core's save.
    """
    # Uses: FullyParallelSaveStrategyWrapper, `sharded_strategy` of dist_checkpointing.save
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    strategy = FullyParallelSaveStrategyWrapper(InProcessSave(writer), group)
    dist_checkpointing.save(state, str(writer.path), sharded_strategy=strategy)


def sharded_factor(
    key: str,
    factor: Tensor,
    *,
    replica: tuple[int, int, int],
    glu: bool,
    cut: tuple[int, int, int] | None = None,
    stacked: tuple[int, int, int] | None = None,
) -> Any:
    """Describe this rank's shard of a matrix to Megatron-core's checkpoints.

    Args:
        key: the matrix's name on disk.
        factor: the shard.
        replica: number of this copy of the shard; (0, 0, 0) writes it.
        glu: the whole matrix is [gate; up], and the shard [its gate; its up].
        cut: dimension that tensor parallelism cuts, number of the shard, number of shards.
        stacked: the same of a leading dimension that the matrix itself does not have.
    """
    # Uses: transformer.mlp.apply_swiglu_sharded_factory
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    lead = () if stacked is None else (stacked,)
    dim, *where = cut or (0, 0, 1)
    part = ShardedTensor.from_rank_offsets(
        key,
        factor,
        *lead,
        (dim + len(lead), *where),
        replica_id=replica,
        prepend_axis_num=len(lead),
    )
    return apply_swiglu_sharded_factory(part, lead) if glu else part
