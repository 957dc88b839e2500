"""AdamW on Megatron-core's distributed optimizer, and the schedule of its learning rate."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from gapo_megatron.compat import apex, megatron_optimizer, transformer_engine
from gapo_megatron.compat.megatron_optimizer import (
    CHECKPOINT_METADATA,
    create_state,
    gather_in_pieces,
    gather_state,
    inner_optimizers,
    leave_out_empty,
    set_weight_decay,
)
from gapo_megatron.compat.optimizer_implementation import Implementation, in_use, keep
from gapo_megatron.config import OptimizerConfig, counts
from gapo_megatron.errors import ConfigError
from gapo_megatron.policy import reduction
from gapo_megatron.policy.model import PolicyModel
from gapo_megatron.policy.parallel import ParallelGroups

__all__ = [
    "CHECKPOINT_METADATA",
    "build_optimizer",
    "choose_implementation",
    "gather_state",
    "inner_optimizers",
    "learning_rate",
    "load_state",
    "wrap_model",
]

logger = logging.getLogger(__name__)

_PREFERENCE: tuple[Implementation, ...] = ("transformer_engine", "apex", "torch")
"""What `optimizer.implementation` "auto" takes, from the first on."""


def wrap_model(
    model: PolicyModel, groups: ParallelGroups, *, overlap_grad_reduce: bool
) -> DistributedDataParallel:
    """Wrap the model in DDP: fp32 gradient buffers, reduce-scattered over ranks of equal weights.

    With `overlap_grad_reduce` it also needs a `GradientReduction`.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap_grad_reduce,
        # Only for the first pipeline stage; Megatron-core gives the others a single bucket.
        bucket_size=counts.bucket_size(groups.dp_cp_group.size()),
        # The head reads its weight outside the layer whose hooks would wait for the gather.
        overlap_param_gather=False,
        check_for_nan_in_grad=False,
    )
    wrapper = reduction.OverlappingModel if overlap_grad_reduce else DistributedDataParallel
    return wrapper(model.config, ddp_config, model)


def choose_implementation(config: OptimizerConfig, device: torch.device) -> Implementation:
    """Resolve `optimizer.implementation` to a library, the same on every rank.

    Collectives: with "auto" where a GPU is, at most three all-reduces of one number over all ranks.

    Raises:
        ConfigError: the one that is named cannot be used here, and why.
    """
    wanted = config.implementation
    if wanted != "auto":
        if reason := _why_not(wanted, device):
            raise ConfigError(f"optimizer.implementation ({wanted!r}): {reason}")
        return wanted
    if not has_gpu(device):
        return "torch"
    for chosen in _PREFERENCE:
        reason = _why_not(chosen, device)
        # Ranks with different kernels would round differently.
        lacking = torch.tensor(int(bool(reason)), device=device)
        dist.all_reduce(lacking, op=dist.ReduceOp.MAX)
        if not lacking.item():
            break
        if not reason:
            logger.warning(
                "optimizer.implementation ('auto') passes over %r, which not every rank has", chosen
            )
        elif chosen == "apex" and apex.is_installed():
            logger.warning("optimizer.implementation ('auto') passes over 'apex': %s", reason)
    return chosen


def has_gpu(device: torch.device) -> bool:
    """Whether fused kernels can run on a device."""
    return device.type == "cuda"


def _why_not(implementation: Implementation, device: torch.device) -> str:
    """Why an implementation cannot be used; empty if it can."""
    if implementation == "torch":
        return ""
    if not has_gpu(device):
        return "its kernels need a GPU; use 'auto' or 'torch' here"
    if implementation == "apex":
        reason = apex.why_not()
        return reason and f"{reason}; tools/setup_gpu_env.sh --apex builds NVIDIA's"
    if transformer_engine.is_installed():
        return ""
    return "Transformer Engine is not installed; tools/setup_gpu_env.sh installs it"


def build_optimizer(
    config: OptimizerConfig,
    model: list[DistributedDataParallel],
    implementation: Implementation,
) -> MegatronOptimizer:
    """AdamW with state sharded over ranks of equal weights; no decay of biases and norm weights.

    Args:
        config: the optimizer's settings.
        model: the virtual stages of this rank.
        implementation: whose kernels it takes, also for the gradient's norm and clipping.

    Raises:
        ConfigError: Megatron-core or the implementation would make wrong checkpoints of it.
    """
    params_dtype = model[0].config.params_dtype
    with in_use(implementation):
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
                # Never fp16=True: it would scale the loss again (`policy.loss_scale`).
                params_dtype=params_dtype,
                use_distributed_optimizer=True,
            ),
            model,
            use_gloo_process_groups=False,
        )
    leave_out_empty(optimizer)
    keep(optimizer, implementation)
    _set_hyperparameters(optimizer, config)
    create_state(optimizer)
    gather_in_pieces(optimizer)
    return optimizer


def load_state(
    optimizer: MegatronOptimizer, state: dict[Any, Any], *, config: OptimizerConfig
) -> None:
    """Load the optimizer's part of a checkpoint; hyperparameters are those of the config.

    Args:
        optimizer: the optimizer as built.
        state: loaded result of its `sharded_state_dict`.
        config: the optimizer's settings.
    """
    megatron_optimizer.load_state(optimizer, state)
    _set_hyperparameters(optimizer, config)


def _set_hyperparameters(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps
    set_weight_decay(optimizer, config.weight_decay)


def learning_rate(config: OptimizerConfig, num_updates: int) -> float:
    """Learning rate of update `num_updates` (from 0): linear warm-up, then `schedule`.

        floor + (peak - floor) * share(x),    x = (update - warm-up) / (decay_steps - warm-up)

    with share(x) = 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine); the floor from x = 1 on. A
    function of its arguments alone: a resumed run repeats it.

    Args:
        config: the optimizer's settings, `decay_steps` set unless the schedule is constant.
        num_updates: updates done; mini-batches without a gradient, and passes repeated after an
            overflow, do not count.
    """
    peak, floor = config.learning_rate, config.min_learning_rate
    if num_updates < config.warmup_steps:
        return peak * (num_updates + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    assert config.decay_steps is not None  # `Config` has set it
    x = (num_updates - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    if x >= 1:
        return floor
    share = 1 - x if config.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return floor + (peak - floor) * share
