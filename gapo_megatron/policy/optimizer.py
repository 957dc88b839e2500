"""AdamW on Megatron-core's distributed optimizer, with the paper's constant learning rate."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from gapo_megatron.config import OptimizerConfig
from gapo_megatron.policy.model import PolicyModel


def wrap_model(config: TransformerConfig, model: PolicyModel) -> DistributedDataParallel:
    """Give the model its gradient buffers: fp32, summed into shards over data parallel ranks."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=False,
    )
    return DistributedDataParallel(config, ddp_config, model)


def build_optimizer(
    config: OptimizerConfig, model: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """AdamW; state sharded over data parallel ranks; biases and norm weights do not decay."""
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
    )
    for group in optimizer.param_groups:
        # Megatron-core marks what must not decay; acting on the mark is left to its scheduler.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer


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
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=grad_norm)
    optimizer.step_with_ready_grads()
