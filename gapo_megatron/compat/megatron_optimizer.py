"""Undocumented parts of Megatron-core's distributed optimizer in use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import __version__ as version
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from gapo_megatron.errors import ConfigError

CHECKPOINT_METADATA = {
    # The one optimizer format that may be loaded onto another layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    # A parameter's key is the same whichever part of the optimizer it belongs to.
    "chained_optim_avoid_prefix": True,
}
"""Options of `sharded_state_dict`: the format in which Megatron-core writes model and optimizer."""
# Uses: `metadata` of sharded_state_dict
# Versions: megatron-core 0.16.1, 0.19.2
# Upstream: none found (close to it NVIDIA/Megatron-LM#1517, closed: other parallelism in a load)

_STATE = ("param", "exp_avg", "exp_avg_sq")
"""Megatron-core's names of master weights and moments."""

_GATHERED_AT_ONCE = 2**26
"""Numbers of the optimizer's state on the device: 256 MiB."""


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The chained optimizers (dense, experts), or the single one."""
    # Uses: ChainedOptimizer.chained_optimizers
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found
    return getattr(optimizer, "chained_optimizers", [optimizer])


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """AdamW of every part that has parameters on this rank."""
    # Uses: MegatronOptimizer.optimizer
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found
    inner = [part.optimizer for part in parts(optimizer)]
    return [one for one in inner if one is not None]


def create_state(optimizer: MegatronOptimizer) -> None:
    """Make the moments now, not in the first update: they can be saved, and their room is taken."""
    # Uses: DistributedOptimizer.init_state_fn, .optimizer, .config
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found
    for part in parts(optimizer):
        if part.optimizer is not None:
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.AdamW):  # the others count steps by group
            for state in part.optimizer.state.values():
                state["step"] = torch.zeros(())


def set_weight_decay(optimizer: MegatronOptimizer, value: float) -> None:
    """Set the weight decay of parameters marked as decaying, like Megatron-core's scheduler."""
    # Uses: param_groups: wd_mult
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found
    for group in optimizer.param_groups:
        group["weight_decay"] = value * group["wd_mult"]


def clip_and_step(optimizer: MegatronOptimizer, *, grad_norm: float, max_norm: float) -> None:
    """Clip prepared gradients of this norm, and move the weights."""
    # Uses: optimizer.clip_grads.clip_grad_by_total_norm_fp32, step_with_ready_grads
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found
    for part in parts(optimizer):
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=grad_norm)
    optimizer.step_with_ready_grads()


# --- saves ---------------------------------------------------------------------------------------


def gather_in_pieces(optimizer: MegatronOptimizer) -> None:
    """Let saves and loads bring the optimizer's state to host memory a piece at a time.

    Megatron-core's own way gathers a buffer on the device in one piece, all weights of a stage,
    when vLLM has that memory already. And it leaves out the padding between buckets, though
    parameters are looked up where they are with it (0.16 to 0.19).

    Raises:
        ConfigError: this Megatron-core looks them up elsewhere; see `check_look_up`.
    """
    # Uses: DistributedOptimizer.get_parameter_state_dp_zero, replaced
    # Versions: megatron-core 0.16.1, 0.19.2; not those with NVIDIA/Megatron-LM#5077
    # Upstream: NVIDIA/Megatron-LM#5077 (merged), #6342 (open): the look-up subtracts the padding;
    #     #5255 (closed: cost of this way). The public flag
    #     `distrib_optim_fully_reshardable_mem_efficient` needs gloo, and gathers at one rank
    for part in parts(optimizer):
        check_look_up(part)
        part.get_parameter_state_dp_zero = functools.partial(_whole_state, part)


def check_look_up(part: Any) -> None:
    """Refuse a Megatron-core that reads state at other offsets than `_whole_state` writes it.

    It would silently read wrong numbers. So it is tested with buffers without memory: the offsets
    that it computes must be those of the parameters' gradients in their buffers.

    Args:
        part: one of `parts(optimizer)`, as built.

    Raises:
        ConfigError: names the version, and the two offsets of a parameter.
    """
    # Uses: DistributedOptimizer.sharded_param_state_fully_reshardable, .buffers, .gbuf_ranges;
    #     Parameter.main_grad
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: NVIDIA/Megatron-LM#5077 (merged, in neither), #6342 (open)
    # Buffers without memory, as large as the real ones, and the offset of every parameter in them.
    layout = {
        i: {dtype: {"param": torch.empty(buffer.numel, dtype=torch.float32, device="meta")}}
        for i, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True))
        for dtype in ranges
    }
    names: dict[str, Any] = {}
    places: dict[str, int] = {}
    for i, buffer in enumerate(part.buffers):
        for number, parameter in enumerate(buffer.params):
            name = f"buffer {i}, parameter {number} of shape {tuple(parameter.shape)}"
            names[name] = ShardedTensor.from_rank_offsets(name, parameter)
            start = buffer.grad_data.storage_offset()
            places[f"optimizer.state.param.{name}"] = parameter.main_grad.storage_offset() - start
    # What Megatron-core makes of them.
    with contextlib.ExitStack() as undo:
        undo.callback(delattr, part, "get_parameter_state_dp_zero")
        part.get_parameter_state_dp_zero = lambda **_: layout
        found = part.sharded_param_state_fully_reshardable(
            names, is_loading=True, metadata=dict(CHECKPOINT_METADATA)
        )
    for tensors in found.values():
        tensor = tensors["param"]
        if tensor.data.storage_offset() != places[tensor.key]:
            raise ConfigError(
                f"megatron-core {version} reads the optimizer's state at offset "
                f"{tensor.data.storage_offset()}, but this package writes it at "
                f"{places[tensor.key]} ({tensor.key}): a checkpoint would mix up parameters, "
                "because of padding between buckets. Use a version from 0.16.1 to 0.19.2"
            )


def _whole_state(part: Any, *, empty_data: bool, **_: bool) -> dict[Any, Any]:
    """Gather master weights and moments of this rank's stages in the layout of the buffers.

    Args:
        part: one of `parts(optimizer)`.
        empty_data: set for a load, which fills the tensors.

    Returns:
        By buffer and dtype: float32 tensors in host memory, on every rank.

    Collectives, unless `empty_data`: all-gathers over the ranks that shard the state.
    """
    # Uses: DistributedOptimizer.buffers, .gbuf_ranges; buffers: numel, buckets, params; grad_data
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: as of `gather_in_pieces`
    state: dict[Any, Any] = {}
    for i, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        ((dtype, ranges_of_buckets),) = ranges.items()
        whole = {key: torch.empty(buffer.numel, dtype=torch.float32) for key in _STATE}
        state[i] = {dtype: whole}
        start = 0
        for bucket, ranges_of_bucket in zip(buffer.buckets, ranges_of_buckets, strict=True):
            end = start + bucket.grad_data.numel()
            if not empty_data:
                into = {key: tensor[start:end] for key, tensor in whole.items()}
                _gather_bucket(part, ranges_of_bucket["param_map"], into, buffer.params[0].device)
            start = end
    return state


def _gather_bucket(
    part: Any, ranges: dict[Tensor, Any], into: dict[str, Tensor], device: torch.device
) -> None:
    # Uses: DistributedOptimizer.data_parallel_group, ._get_main_param_and_optimizer_states;
    #     param_map: gbuf_local
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: as of `gather_in_pieces`
    num_ranks = part.data_parallel_group.size()
    for key, whole in into.items():
        by_rank = whole.view(num_ranks, -1)
        mine = torch.zeros(by_rank.shape[1])
        for parameter, where in ranges.items():
            tensor = part._get_main_param_and_optimizer_states(parameter)[key]
            mine[where["gbuf_local"].start : where["gbuf_local"].end] = tensor.detach()
        pieces = mine.split(max(1, _GATHERED_AT_ONCE // num_ranks))
        for piece, there in zip(pieces, by_rank.split(len(pieces[0]), dim=1), strict=True):
            gathered = torch.empty(num_ranks * len(piece), device=device)
            dist.all_gather_into_tensor(gathered, piece.to(device), group=part.data_parallel_group)
            there.copy_(gathered.view(num_ranks, -1))


# --- loads ---------------------------------------------------------------------------------------


def load_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Load the optimizer's part of a checkpoint, working around two bugs of Megatron-core.

    0.16 ties a checkpoint to its layout: with expert parallelism the optimizer has a second part,
    and a load needs as many parts as the save had. Apart from tensors, all parts store the same,
    and only the step counter matters.

    0.16 to 0.19 with torch's AdamW (without Transformer Engine) expect every parameter's step
    counter among the loaded tensors, where it is missing, and then give all parameters one shared
    counter, which each of them would advance.

    Args:
        optimizer: the optimizer as built.
        state: loaded result of its `sharded_state_dict`.
    """
    # Uses: DistributedOptimizer._set_main_param_and_optimizer_states, replaced; keys "optimizer",
    #     "param_state", "param_state_sharding_type" of load_state_dict
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: none found (close to it NVIDIA/Megatron-LM#5976, merged: Megatron-FSDP alone)
    of_parts = parts(optimizer)
    saved = state if "optimizer" in state else state[0]
    step = saved["optimizer"]["param_groups"][0].get("step")
    for i, part in enumerate(of_parts):
        groups = part.state_dict()["optimizer"]
        if step is not None:  # Transformer Engine's has none before its first step
            for group in groups["param_groups"]:
                group["step"] = step
        given = state if len(of_parts) == 1 else state[i]
        with contextlib.ExitStack() as undo:
            undo.callback(delattr, part, "_set_main_param_and_optimizer_states")
            part._set_main_param_and_optimizer_states = functools.partial(
                _set_all_but_step, part, part._set_main_param_and_optimizer_states
            )
            part.load_state_dict(
                {
                    "optimizer": groups,
                    "param_state": given["param_state"],
                    "param_state_sharding_type": CHECKPOINT_METADATA["distrib_optim_sharding_type"],
                }
            )


def _set_all_but_step(
    part: Any, set_tensors: Callable[..., None], model_param: Tensor, tensors: dict[str, Tensor]
) -> None:
    # Uses: DistributedOptimizer.model_param_group_index_map
    # Versions: megatron-core 0.16.1, 0.19.2
    # Upstream: as of `load_state`
    group, position = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][position]]
    step = state.pop("step", None)
    set_tensors(model_param, tensors)
    if step is not None:
        state["step"] = step.clone()
