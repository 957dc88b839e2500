"""Seconds of a step by stage: a roofline, every term with its equation.

Nothing overlaps that does not overlap in the trainer: Megatron-core's gradient reduction and
parameter gather, tensor parallel collectives and the all-to-all of experts all wait.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Self

from gapo_megatron.config import Config
from gapo_megatron.scaling.arithmetic import Shape, forward_flops
from gapo_megatron.scaling.efficiency import Efficiency
from gapo_megatron.scaling.generation import generation_s
from gapo_megatron.scaling.hardware import CPU_NAME, GIB, Gpu
from gapo_megatron.scaling.layout import Layout
from gapo_megatron.scaling.workload import Workload

_MOST_WORKERS = 8
"""Of a rank, where `reward.num_workers` is 0."""
_ACCUMULATE_BYTES = 10
"""Of one weight and micro-batch: its gradient (2) is added to a float32 buffer (4 + 4)."""
_CLEAR_BYTES = 8
"""Of one weight: the float32 buffer is cleared and read for the norm."""
_OPTIMIZER_BYTES = 28
"""Of one weight of the optimizer's share: gradient, master and two moments are read (16), master
and moments written (12)."""
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
            reward_s=reward_s(config, training.layout, training.gpu, training.efficiency),
            old_log_probs_s=training.old_log_probs_s(),
            update_s=config.batch.num_minibatches * training.update_s(),
            sync_s=sync_s(training),
        )


def step_time(
    hf_config: Any | Shape,
    config: Config,
    layout: Layout,
    workload: Workload,
    gpu: Gpu,
    efficiency: Efficiency,
    *,
    kv_cache_bytes: float | None = None,
) -> StepTime:
    """Predict one step.

    Args:
        hf_config: the model's, or its `Shape`.
        config: of the run; its parallel sizes are not read, `layout` has them.
        layout: how it is cut.
        workload: lengths of a step.
        gpu: device.
        efficiency: what is reached of it.
        kv_cache_bytes: of one rank, None: `rollout.memory_fraction` less the weights.
    """
    shape = hf_config if isinstance(hf_config, Shape) else Shape.of(hf_config)
    if kv_cache_bytes is None:
        kv_cache_bytes = default_kv_cache_bytes(shape, config, layout, gpu)
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
            kv_cache_bytes=kv_cache_bytes,
        ),
    )


def default_kv_cache_bytes(shape: Shape, config: Config, layout: Layout, gpu: Gpu) -> float:
    """What vLLM has left of its share of the memory for keys and values, without its work space."""
    if gpu.name == CPU_NAME:
        return float(config.rollout.cpu_kv_cache_gib * GIB)
    weights = shape.num_parameters * _element_bytes(config) / layout.rollout_tp_size
    return max(0.0, config.rollout.memory_fraction * gpu.memory_bytes - weights)


def reward_s(config: Config, layout: Layout, gpu: Gpu, efficiency: Efficiency) -> float:
    """Sequences of a rank x verdict_s / its workers: every rank judges its share."""
    cores = (os.cpu_count() or 1) if gpu.name == CPU_NAME else _MOST_WORKERS
    workers = config.reward.num_workers or min(_MOST_WORKERS, max(1, cores))
    sequences = config.batch.rollout_prompts * config.batch.rollouts_per_prompt
    return sequences / layout.world_size * efficiency.verdict_s / workers


@dataclass(frozen=True, slots=True)
class Training:
    """One mini-batch on the busiest data parallel rank."""

    shape: Shape
    config: Config
    layout: Layout
    workload: Workload
    gpu: Gpu
    efficiency: Efficiency

    def old_log_probs_s(self) -> float:
        """(mini-batches - 1) forward passes: the first is its own old pass; all with a KL term."""
        num_passes = self.config.batch.num_minibatches - 1
        if self.config.objective.kl_coef > 0:
            num_passes += self.config.batch.num_minibatches
        return num_passes * self.pass_s(backward=False)

    def update_s(self) -> float:
        """Forward and backward passes, the reduction of gradients, the optimizer."""
        return self.pass_s(backward=True) + self.optimizer_s() + self.efficiency.update_s

    @property
    def num_sequences(self) -> float:
        """Of a mini-batch that are computed, on one data parallel rank."""
        batch = self.config.batch
        share = self.workload.active_share
        if self.config.objective.needs_every_sequence:
            share = 1.0
        return batch.minibatch_prompts * batch.rollouts_per_prompt * share / self.layout.dp_size

    @property
    def num_tokens(self) -> float:
        """Of them on the busiest rank: at least one sequence."""
        return max(self.num_sequences, 1.0) * self.workload.mean_tokens

    @property
    def num_microbatches(self) -> int:
        """The batching plan fills micro-batches evenly, up to the budget."""
        return max(1, math.ceil(self.num_tokens / self.config.batch.max_tokens_per_microbatch))

    def pass_s(self, *, backward: bool) -> float:
        """One pass over the micro-batches of a mini-batch, through p pipeline stages.

            pass = (p - 1) x stage + last + (m - 1) x last

        `stage` and `last` are one micro-batch's seconds in a stage, `last` with the head. The first
        micro-batch walks through all stages, the others follow at the pace of the slowest; with
        equal stages that is a bubble of (p - 1) / m.
        """
        stage_s = self.stage_s(backward=backward)
        last_s = stage_s + self.head_s(backward=backward)
        return (self.layout.pp_size - 1) * stage_s + self.num_microbatches * last_s

    def stage_s(self, *, backward: bool) -> float:
        """One micro-batch in one stage without the head.

        products = factor x (layers + attention flops) / (p t) / (peak x matmul)
        factor   = 1 forward, 3 with backward, 4 with full recomputation (selective: the
                   attention's once more)
        launches = factor x layers / p x layer_s
        adding   = backward: 10 bytes of every weight / bandwidth
        and the collectives of `_tensor_s`, `_context_s`, `_experts_s`, `_pipeline_s`
        """
        layout, flops, efficiency = self.layout, self._flops(), self.efficiency
        factor = self._factor(backward)
        operations = factor * (flops.layers + flops.attention)
        if backward and layout.recompute == "selective":
            operations += flops.attention
        layers = self.shape.num_layers / layout.pp_size
        seconds = operations / (layout.pp_size * layout.tp_size) / self._products(head=False)
        seconds += factor * layers * efficiency.layer_s
        if backward:
            streamed = _ACCUMULATE_BYTES * sum(self._weights())
            seconds += streamed / (self.gpu.bandwidth * efficiency.bandwidth)
        collectives = (self._tensor_s, self._context_s, self._experts_s)
        seconds += layers * sum(collective(backward) for collective in collectives)
        return seconds + self._pipeline_s(backward)

    def head_s(self, *, backward: bool) -> float:
        """Log-probs of a micro-batch's responses.

            head = (1 + 3 x (1 - clipped share)) x logits' flops / t / (peak x matmul), forward 1

        The backward pass computes the logits again, and two products as large, of active rows only.
        """
        factor = 1 + 3 * (1 - self.workload.clipped_share) if backward else 1.0
        return factor * self._flops().head / self.layout.tp_size / self._products(head=True)

    def optimizer_s(self) -> float:
        """After the last micro-batch.

        reduce   = 4 bytes of every weight x (d - 1) / d / network, d the ranks that share it
        gather   = the weights' bytes likewise
        optimize = (8 bytes of every weight + 28 of the rank's 1/d) / bandwidth
        """
        layout, efficiency = self.layout, self.efficiency
        ways = [
            (layout.copies, layout.tp_size),
            (layout.ranks_per_stage // layout.ep_size, layout.ep_size),
        ]
        seconds = 0.0
        for weights, (size, stride) in zip(self._weights(), ways, strict=True):
            sent = weights * (4 + _element_bytes(self.config)) * (size - 1) / size
            rate = self.gpu.group_bandwidth(size, stride=stride) * efficiency.communication
            streamed = weights * (_CLEAR_BYTES + _OPTIMIZER_BYTES / size)
            seconds += sent / rate + streamed / (self.gpu.bandwidth * efficiency.bandwidth)
            seconds += 2 * efficiency.collective_s * (size > 1)
        return seconds

    def _factor(self, backward: bool) -> int:
        if not backward:
            return 1
        return 4 if self.layout.recompute == "full" else 3

    def _products(self, *, head: bool) -> float:
        """Operations per second. The head accumulates in float32, from bfloat16 where layers do."""
        precision = self.config.model.precision
        peak = self.gpu.flops("bf16" if head and precision == "fp8" else precision)
        return peak * self.efficiency.matmul

    def _flops(self) -> Any:
        """Of one micro-batch, on one of the ranks that share its sequences."""
        share = 1 / (self.num_microbatches * self.layout.cp_size)
        sequences = max(self.num_sequences, 1.0) * share
        return forward_flops(
            self.shape,
            num_tokens=self.num_tokens * share,
            mean_squared_length=self.workload.mean_squared_tokens,
            num_sequences=sequences,
            num_scored=sequences * self.workload.mean_response_tokens,
        )

    def _weights(self) -> tuple[float, float]:
        layout = self.layout
        return self.shape.weights_per_rank(
            tp_size=layout.tp_size, pp_size=layout.pp_size, ep_size=layout.ep_size
        )

    @property
    def _hidden_bytes(self) -> float:
        """Hidden states of one micro-batch, on one of the ranks that share its sequences."""
        return self._tokens_per_rank * self.shape.hidden * _element_bytes(self.config)

    @property
    def _tokens_per_rank(self) -> float:
        return self.num_tokens / self.num_microbatches / self.layout.cp_size

    def _tensor_s(self, backward: bool) -> float:
        """Tensor parallel collectives of one layer and micro-batch.

            tensor = units x (hidden states x (t - 1) / t / link + collective_s)

        Units: an all-reduce is two, an all-gather or reduce-scatter one. Forward 4, backward 4 (6
        with sequence parallelism, which gathers again), full recomputation 4 more. In a model with
        experts only attention has them.
        """
        layout = self.layout
        if layout.tp_size == 1:
            return 0.0
        units = 4
        if backward:
            units += 6 if layout.sequence_parallel else 4
            units += 4 if layout.recompute == "full" else 0
        if self.shape.num_experts:
            units //= 2
        sent = self._hidden_bytes * (layout.tp_size - 1) / layout.tp_size
        rate = self.gpu.group_bandwidth(layout.tp_size, stride=1) * self.efficiency.communication
        return units * (sent / rate + self.efficiency.collective_s)

    def _context_s(self, backward: bool) -> float:
        """The ring of keys and values of one layer and micro-batch.

            ring = passes x (c - 1) x (a rank's keys and values / link + collective_s)

        Passes: 1 forward, 2 backward (their gradients go round too), 1 where it is recomputed.
        """
        layout, shape = self.layout, self.shape
        if layout.cp_size == 1:
            return 0.0
        passes = 1
        if backward:
            passes = 3 if layout.recompute == "none" else 4
        width = 2 * shape.kv_heads * shape.head_dim / layout.tp_size
        sent = self._tokens_per_rank * width * _element_bytes(self.config)
        rate = self.gpu.group_bandwidth(layout.cp_size, stride=layout.tp_size)
        each = sent / (rate * self.efficiency.communication) + self.efficiency.collective_s
        return passes * (layout.cp_size - 1) * each

    def _experts_s(self, backward: bool) -> float:
        """All-to-all to the experts and back, of one layer and micro-batch.

            experts = 2 x factor' x (tokens of the rank x k x hidden
                      x max((n - 1) / e / link, (e - n) / e / network) + collective_s)

        factor' = 1 forward, 2 with backward, 3 with recomputation. Of e ranks n share a node; what
        leaves it goes through each rank's own network adapter.
        """
        layout, gpu = self.layout, self.gpu
        if layout.ep_size == 1:
            return 0.0
        sent = self._hidden_bytes / layout.tp_size * self.shape.experts_per_token / layout.ep_size
        members = gpu.members_in_node(layout.ep_size, stride=1)
        inside_s = (members - 1) * sent / gpu.link_bandwidth
        outside_s = (layout.ep_size - members) * sent / gpu.network_bandwidth
        each = max(inside_s, outside_s) / self.efficiency.communication
        each += self.efficiency.collective_s
        times = 1 if not backward else 3 if layout.recompute == "full" else 2
        return 2 * times * each

    def _pipeline_s(self, backward: bool) -> float:
        """Hidden states to the next stage, and their gradients back: bytes / network."""
        layout = self.layout
        if layout.pp_size == 1:
            return 0.0
        sent = self._hidden_bytes / (layout.tp_size if layout.sequence_parallel else 1)
        in_node = layout.world_size <= self.gpu.gpus_per_node
        rate = self.gpu.link_bandwidth if in_node else self.gpu.network_bandwidth
        each = sent / (rate * self.efficiency.communication) + self.efficiency.collective_s
        return (2 if backward else 1) * each


def sync_s(training: Training) -> float:
    """Weights to the engine: every rank sees every tensor whole, one after another.

    sync = W / t / network (broadcast over p stages) + W (t - 1) / t / link (gather)
           + W_experts (e - 1) / e / link + 2 W / bandwidth (copy)
           + tensors x tensor_s + verify_sequences one by one through the layers + engine steps
    """
    layout, gpu, efficiency = training.layout, training.gpu, training.efficiency
    shape, config = training.shape, training.config
    size = float(shape.num_parameters * _element_bytes(config))
    experts = float(shape.num_layers * shape.num_experts * shape.expert_weights)
    experts *= _element_bytes(config)
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
    seconds += config.rollout.verify_sequences * shape.num_layers * efficiency.layer_s
    return seconds + _PROBE_STEPS * efficiency.decode_step_s


def _element_bytes(config: Config) -> int:
    return 4 if config.model.precision == "fp32" else 2
