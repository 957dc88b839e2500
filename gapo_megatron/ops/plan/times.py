"""Seconds of a step by stage, made of what generation and training take."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

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
    """Seconds by stage. Evaluation, checkpoints and measured rounding are no part of it."""

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


@dataclass(frozen=True, slots=True)
class SidesTime(StepTime):
    """Seconds by stage where some ranks only generate; `sync_s` is a step's share of a transfer.

    Generation and its rewards are one side's, old log-probs and updates the other's; both take part
    in the sync. On-policy (staleness 0) they alternate; else both work at once, on batches that are
    `max_staleness` steps apart, and weights travel after every so many steps:

        staleness 0:  step = (generation + reward) + (old log-probs + updates) + sync
        staleness k:  step = max(generation + reward, old log-probs + updates) + sync / k
    """

    max_staleness: int

    @property
    def total_s(self) -> float:
        sides = (self.generating_s, self.learning_s)
        return (max(sides) if self.max_staleness else sum(sides)) + self.sync_s

    @property
    def generating_s(self) -> float:
        """Work of the generation side, beside the sync."""
        return self.generation_s + self.reward_s

    @property
    def learning_s(self) -> float:
        """Work of the training side, beside the sync."""
        return self.old_log_probs_s + self.update_s

    @property
    def training_waits_s(self) -> float:
        """Seconds of a step in which the training side waits for a batch."""
        return self.total_s - self.sync_s - self.learning_s

    @property
    def generation_waits_s(self) -> float:
        """Seconds of a step in which the generation side waits for weights."""
        return self.total_s - self.sync_s - self.generating_s

    def at(self, max_staleness: int) -> SidesTime:
        """The same work at another staleness."""
        transfer_s = self.sync_s * max(1, self.max_staleness)
        sync_s = transfer_s / max(1, max_staleness)
        return replace(self, max_staleness=max_staleness, sync_s=sync_s)


def step_of(training: Training, *, generation_s: float) -> StepTime:
    """A step of `batch.num_minibatches` updates, whose generation takes so long.

    `SidesTime` where the layout has ranks that only generate.
    """
    config = training.config
    old_s, rewards_s = training.old_log_probs_s(), reward_s(training)
    updates_s = config.batch.num_minibatches * training.update_s()
    if training.layout.num_generation:
        times = SidesTime(generation_s, rewards_s, old_s, updates_s, send_s(training), 0)
        return times.at(config.rollout.max_staleness)
    moved_s = offload_s(training)
    return StepTime(generation_s, rewards_s, old_s, updates_s + moved_s, sync_s(training) + moved_s)


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
    return step_of(
        Training(shape, config, layout, workload, gpu, efficiency),
        generation_s=generation_s(
            shape,
            config,
            rollout_tp_size=layout.rollout_tp_size,
            world_size=layout.rollout_ranks,
            workload=workload,
            gpu=gpu,
            efficiency=efficiency,
        ),
    )


def reward_s(training: Training) -> float:
    """Sequences of a rank x verdict_s / its workers: every rank that generates judges its share."""
    config = training.config
    cores = (os.cpu_count() or 1) if training.gpu.name == CPU_NAME else _MOST_WORKERS
    workers = config.reward.num_workers or min(_MOST_WORKERS, max(1, cores))
    prompts = sum(training.workload.prompts_by_round(config.batch))
    sequences = prompts * config.batch.rollouts_per_prompt / training.layout.rollout_ranks
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

    sync = gather + 2 W / bandwidth (copy) + tensors x tensor_s
           + verified sequences one by one through the layers + engine steps
    """
    gpu, efficiency = training.gpu, training.efficiency
    shape = training.shape
    seconds = _gather_s(training)
    seconds += 2 * _weight_bytes(training) / (gpu.bandwidth * efficiency.bandwidth)
    seconds += shape.num_tensors * efficiency.tensor_s
    seconds += VERIFIED_SEQUENCES * shape.num_layers * efficiency.layer_s
    return seconds + _PROBE_STEPS * efficiency.decode_step_s


def send_s(training: Training) -> float:
    """Weights from the training side to ranks that only generate: one transfer.

    send = sync + W / network (broadcast from the first rank that trains, through its own network
           adapter, in buckets; within one node: over the link) + 2 W / bandwidth (into buckets)

    The gather of the next bucket is not taken to overlap with the broadcast of this one.
    """
    gpu, efficiency = training.gpu, training.efficiency
    in_node = training.layout.num_ranks <= gpu.gpus_per_node
    rate = gpu.link_bandwidth if in_node else gpu.network_bandwidth
    size = _weight_bytes(training)
    seconds = size / (rate * efficiency.communication)
    return sync_s(training) + seconds + 2 * size / (gpu.bandwidth * efficiency.bandwidth)


def _weight_bytes(training: Training) -> float:
    return float(training.shape.num_parameters * element_bytes(training.config))


def _gather_s(training: Training) -> float:
    """Seconds until a rank has had every tensor whole.

    gather = W / t / network (broadcast over p stages) + W (t - 1) / t / link
             + W_experts (e - 1) / e / link
    """
    layout, gpu, shape = training.layout, training.gpu, training.shape
    experts = float(shape.num_layers * shape.num_experts * shape.expert_weights)
    experts *= element_bytes(training.config)
    others = _weight_bytes(training) - experts
    ways = [
        (others * (layout.tp_size - 1) / layout.tp_size, layout.tp_size, 1),
        (experts * (layout.ep_size - 1) / layout.ep_size, layout.ep_size, 1),
    ]
    if layout.pp_size > 1:
        shard = others / layout.tp_size + experts / layout.ep_size
        ways.append((shard, layout.pp_size, layout.ranks_per_stage))
    efficiency = training.efficiency
    return sum(
        sent / (gpu.group_bandwidth(group, stride=stride) * efficiency.communication)
        for sent, group, stride in ways
    )
