"""AdamW on Megatron-core's distributed optimizer, with the paper's constant learning rate."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from gapo_megatron.config import OptimizerConfig, counts
from gapo_megatron.policy import reduction
from gapo_megatron.policy.model import PolicyModel
from gapo_megatron.policy.parallel import ParallelGroups

CHECKPOINT_METADATA = {
    # The one optimizer format that may be loaded onto another layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    # A parameter's key is the same whichever part of the optimizer it belongs to.
    "chained_optim_avoid_prefix": True,
}
"""How Megatron-core writes model and optimizer."""

_STATE = ("param", "exp_avg", "exp_avg_sq")
"""Megatron-core's names of master weights and moments."""

_GATHERED_AT_ONCE = 2**26
"""Numbers of the optimizer's state on the device: 256 MiB."""


def wrap_model(
    model: PolicyModel, groups: ParallelGroups, *, overlap_grad_reduce: bool
) -> DistributedDataParallel:
    """Give the model its gradient buffers: fp32, summed into shards over ranks of equal weights.

    With `overlap_grad_reduce` it needs a `GradientReduction`.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap_grad_reduce,
        # Of the first pipeline stage; Megatron-core gives the others one bucket.
        bucket_size=counts.bucket_size(groups.dp_cp_group.size()),
        # The head reads its weight outside of the layer whose hooks would wait for it.
        overlap_param_gather=False,
        check_for_nan_in_grad=False,
    )
    wrapper = reduction.OverlappingModel if overlap_grad_reduce else DistributedDataParallel
    return wrapper(model.config, ddp_config, model)


def build_optimizer(
    config: OptimizerConfig, model: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """AdamW; state sharded over ranks of equal weights; biases and norm weights do not decay."""
    params_dtype = model[0].config.params_dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=params_dtype == torch.bfloat16,
            params_dtype=params_dtype,
            use_distributed_optimizer=True,
        ),
        model,
        use_gloo_process_groups=False,
    )
    _set_hyperparameters(optimizer, config)
    _create_state(optimizer)
    for part in _parts(optimizer):
        part.get_parameter_state_dp_zero = functools.partial(_whole_state, part)
    return optimizer


def _whole_state(part: Any, *, empty_data: bool, **_: bool) -> dict[Any, Any]:
    """Master weights and moments of this rank's stages, as Megatron-core lays its buffers out.

    Stands in for Megatron-core's own in a save and a load (0.16 to 0.19), which gathers a buffer on
    the device in one piece, all weights of a stage, when vLLM has that memory already. And which
    leaves out the padding between buckets, though parameters are looked up where they are with it.

    Args:
        part: of the optimizer.
        empty_data: of a load: the tensors are there to be filled.

    Returns:
        By buffer and dtype: float32 tensors in host memory, on every rank.

    Collectives, unless `empty_data`: all-gathers over the ranks that share the state.
    """
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


def load_state(
    optimizer: MegatronOptimizer, state: dict[Any, Any], *, config: OptimizerConfig
) -> None:
    """Take the optimizer's part of a loaded checkpoint; hyperparameters stay the config's.

    Mends Megatron-core where it ties a checkpoint to its layout (0.16): experts that are spread
    over ranks make a second part of the optimizer, and as many parts had to load it. What it keeps
    for each beside the tensors is the same in all; of that the step counter alone matters.

    And where it runs torch's AdamW, that is, without Transformer Engine (0.16 to 0.19): it looks
    for every parameter's step counter among the loaded tensors, where it is not, and gives all
    parameters one shared counter, which each of them would advance.

    Args:
        optimizer: as built.
        state: what its `sharded_state_dict` asked for, and what the writer kept for its parts.
        config: of the run.
    """
    parts = _parts(optimizer)
    saved = state if "optimizer" in state else state[0]
    step = saved["optimizer"]["param_groups"][0].get("step")
    for i, part in enumerate(parts):
        groups = part.state_dict()["optimizer"]
        if step is not None:  # Transformer Engine's has none before its first step
            for group in groups["param_groups"]:
                group["step"] = step
        given = state if len(parts) == 1 else state[i]
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
    _set_hyperparameters(optimizer, config)


def _set_all_but_step(
    part: Any, set_tensors: Callable[..., None], model_param: Tensor, tensors: dict[str, Tensor]
) -> None:
    group, position = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][position]]
    step = state.pop("step", None)
    set_tensors(model_param, tensors)
    if step is not None:
        state["step"] = step.clone()


def _set_hyperparameters(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps
        # Megatron-core marks what must not decay; acting on the mark is left to its scheduler.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]


def _create_state(optimizer: MegatronOptimizer) -> None:
    """Make the moments now, not in the first update: they can be saved, and their room is taken."""
    for part in _parts(optimizer):
        if part.optimizer is not None:
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.AdamW):  # the others count steps by group
            for state in part.optimizer.state.values():
                state["step"] = torch.zeros(())


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """AdamW of every part that has parameters on this rank."""
    inner = [part.optimizer for part in _parts(optimizer)]
    return [one for one in inner if one is not None]


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def learning_rate(config: OptimizerConfig, num_updates: int) -> float:
    """Of update number `num_updates` (from 0): constant after a linear warm-up."""
    if num_updates < config.warmup_steps:
        return config.learning_rate * (num_updates + 1) / config.warmup_steps
    return config.learning_rate


def set_learning_rate(optimizer: MegatronOptimizer, value: float) -> None:
    """Of the next step, for every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = value


def step(optimizer: MegatronOptimizer, *, grad_norm: float, clip_grad: float) -> None:
    """Clip to `clip_grad` and move the weights. Gradients are prepared, `grad_norm` is finite."""
    for part in _parts(optimizer):
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()
