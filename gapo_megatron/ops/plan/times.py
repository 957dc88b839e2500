"""Seconds of a step by stage, made of what generation and training take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Self

from gapo_megatron.config import VERIFIED_SEQUENCES, Config
from gapo_megatron.ops.plan.efficiency import Efficiency
from gapo_megatron.ops.plan.flops import Shape, element_bytes
from gapo_megatron.ops.plan.generation import generation_s
from gapo_megatron.ops.plan.hardware import CPU_NAME, Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.state import state_bytes
from gapo_megatron.ops.plan.training import Training
from gapo_megatron.ops.plan.workload import Workload

_MOST_WORKERS = 8
"""Verifier workers of a rank at most, where `reward.num_workers` is 0."""
_PROBE_STEPS = 2
"""Engine steps that score the sequences which verify a sync."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds by stage. Evaluation, checkpoints and the noise floor are no part of it."""

    generation_s: float
    reward_s: float
    old_log_probs_s: float
    update_s: float
    sync_s: float

    @property
    def total_s(self) -> float:
        return (
            self.generation_s + self.reward_s + self.old_log_probs_s + self.update_s + self.sync_s
        )

    @classmethod
    def of(cls, training: Training, *, generation_s: float) -> Self:
        """A step of `batch.num_minibatches` updates, whose generation takes so long."""
        config = training.config
        return cls(
            generation_s=generation_s,
            reward_s=reward_s(training),
            old_log_probs_s=training.old_log_probs_s(),
            update_s=config.batch.num_minibatches * training.update_s() + offload_s(training),
            sync_s=sync_s(training) + offload_s(training),
        )


def step_time(
    hf_config: Any | Shape,
    config: Config,
    layout: Layout,
    workload: Workload,
    gpu: Gpu,
    efficiency: Efficiency,
) -> StepTime:
    """Predict one step.

    Args:
        hf_config: the model's, or its `Shape`.
        config: the run's settings; its parallel sizes are not read, `layout` has them.
        layout: how it is cut.
        workload: lengths of a step.
        gpu: device.
        efficiency: what is reached of it.
    """
    shape = hf_config if isinstance(hf_config, Shape) else Shape.of(hf_config)
    return StepTime.of(
        Training(shape, config, layout, workload, gpu, efficiency),
        generation_s=generation_s(
            shape,
            config,
            rollout_tp_size=layout.rollout_tp_size,
            world_size=layout.world_size,
            workload=workload,
            gpu=gpu,
            efficiency=efficiency,
        ),
    )


def reward_s(training: Training) -> float:
    """Sequences of a rank x verdict_s / its workers: every rank judges its share."""
    config = training.config
    cores = (os.cpu_count() or 1) if training.gpu.name == CPU_NAME else _MOST_WORKERS
    workers = config.reward.num_workers or min(_MOST_WORKERS, max(1, cores))
    prompts = sum(training.workload.prompts_by_round(config.batch))
    sequences = prompts * config.batch.rollouts_per_prompt / training.layout.world_size
    return sequences * training.efficiency.verdict_s / workers


def offload_s(training: Training) -> float:
    """One way of what is offloaded: bytes of the fullest rank / host bandwidth.

    It goes with every sync and comes back with the first pass and update. 0 where nothing does.
    """
    config, offload = training.config, training.config.optimizer.offload
    if offload == "none":
        return 0.0
    states = state_bytes(training.shape.rules, config, training.layout)
    size = max(optimizer + (offload == "all") * weights for weights, _, optimizer in states)
    return size / (training.gpu.host_bandwidth * training.efficiency.communication)


def sync_s(training: Training) -> float:
    """Weights to the engine: every rank sees every tensor whole, one after another.

    sync = W / t / network (broadcast over p stages) + W (t - 1) / t / link (gather)
           + W_experts (e - 1) / e / link + 2 W / bandwidth (copy)
           + tensors x tensor_s + verified sequences one by one through the layers + engine steps
    """
    layout, gpu, efficiency = training.layout, training.gpu, training.efficiency
    shape, config = training.shape, training.config
    size = float(shape.num_parameters * element_bytes(config))
    experts = float(shape.num_layers * shape.num_experts * shape.expert_weights)
    experts *= element_bytes(config)
    others = size - experts
    seconds = 2 * size / (gpu.bandwidth * efficiency.bandwidth)
    ways = [
        (others * (layout.tp_size - 1) / layout.tp_size, layout.tp_size, 1),
        (experts * (layout.ep_size - 1) / layout.ep_size, layout.ep_size, 1),
    ]
    if layout.pp_size > 1:
        shard = others / layout.tp_size + experts / layout.ep_size
        ways.append((shard, layout.pp_size, layout.ranks_per_stage))
    for sent, group, stride in ways:
        rate = gpu.group_bandwidth(group, stride=stride) * efficiency.communication
        seconds += sent / rate
    seconds += shape.num_tensors * efficiency.tensor_s
    seconds += VERIFIED_SEQUENCES * shape.num_layers * efficiency.layer_s
    return seconds + _PROBE_STEPS * efficiency.decode_step_s
