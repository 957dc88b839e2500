"""Undocumented parts of Megatron-core's checkpoints (`dist_checkpointing`) in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from torch.distributed import checkpoint as torch_checkpoint
from torch.nn import Parameter

__all__ = [
    "CheckpointingException",
    "InProcessSave",
    "save_sharded",
    "sharded_tensors",
    "without_frozen",
]
# Of the first, a re-export.
# Uses: megatron.core.dist_checkpointing.core.CheckpointingException
# Versions: megatron-core 0.16.1, 0.19.2
# Upstream: none found


def sharded_tensors(state: dict[str, Any]) -> Iterator[Any]:
    """Yield the sharded objects of a state dict that hold tensors (`data`)."""
    # Uses: dist_checkpointing.dict_utils.nested_values; ShardedTensor.data, ShardedTensorFactory
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found (close to it NVIDIA/Megatron-LM#4475, open, #7013, closed)
    for one in nested_values(state):
        if isinstance(one, ShardedTensor | ShardedTensorFactory):
            yield one


def without_frozen(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a sharded state dict the parameters that are not trained."""
    # Uses: ShardedTensor.data, ShardedTensorFactory.data
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found

    def is_frozen(one: Any) -> bool:
        data = getattr(one, "data", None)
        return isinstance(data, Parameter) and not data.requires_grad

    return {name: one for name, one in state.items() if not is_frozen(one)}


class InProcessSave(torch_strategies.TorchDistSaveShardedStrategy):
    """Saves in Megatron-core's format without forking.

    Its own writer forks a process per file and one more for a queue. With CUDA, OpenMP threads and
    vLLM in the process a fork may deadlock, and on a CPU it takes ten times as long as the save.
    """

    # Uses: strategies.torch: _replace_state_dict_keys_with_sharded_keys, mcore_to_pyt_state_dict,
    #     MCoreSavePlanner, keep_only_main_replica, TorchDistSaveShardedStrategy as a base
    # Versions: megatron-core 0.16.1, 0.19.2 (which writes in threads)
    # Upstream: NVIDIA/Megatron-LM#3424, #3633 (merged, in 0.19.2); none found for another writer

    def __init__(self, make_writer: Callable[[Path], torch_checkpoint.FileSystemWriter]) -> None:
        super().__init__(backend="torch_dist", version=1)
        self._make_writer = make_writer

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Collectives, over all ranks: reduce-scatter of the plan, all-reduce of the results."""
        by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        torch_checkpoint.save(
            torch_strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=self._make_writer(Path(checkpoint_dir)),
            planner=torch_strategies.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )


def save_sharded(
    state: dict[str, Any],
    folder: Path,
    group: dist.ProcessGroup,
    make_writer: Callable[[Path], torch_checkpoint.FileSystemWriter],
) -> None:
    """Write a sharded state dict in the format `torch_dist` into an existing, empty folder.

    Args:
        state: the same keys on every rank that holds them.
        folder: on a file system that all ranks share.
        group: ranks with equal weights; each writes a part of them.
        make_writer: returns the writer for a folder.

    Collectives, over all ranks: those of Megatron-core's save.
    """
    # Uses: FullyParallelSaveStrategyWrapper, `sharded_strategy` of dist_checkpointing.save
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found
    strategy = FullyParallelSaveStrategyWrapper(InProcessSave(make_writer), group)
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)
