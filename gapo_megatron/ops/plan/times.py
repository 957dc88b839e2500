"""Seconds of a step by stage: generation by vLLM, verdicts, training, weight sync."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gapo_megatron.config import Config
from gapo_megatron.ops.plan.flops import (
    Shape,
    element_bytes,
    forward_flops,
    holds_one_sequence,
    kv_cache_tokens,
)
from gapo_megatron.ops.plan.hardware import CPU_NAME, GIB, Efficiency, Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.sync_times import offload_s, send_s, sync_s
from gapo_megatron.ops.plan.training import Training
from gapo_megatron.ops.plan.workload import Workload

_MAX_SEQUENCES = 1024
"""vLLM's default limit on concurrent sequences, on devices of 70 GiB and more (0.32)."""
_MAX_SEQUENCES_SMALL = 256
"""The same limit on smaller devices."""
_MOST_WORKERS = 8
"""Most verifier workers of a rank if `reward.num_workers` is 0."""


STAGES = ("generation", "reward", "old_log_probs", "update", "sync")
"""Stages of a step that are modelled."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by stage, without evaluation, checkpoints and noise-floor measurements."""

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

    def seconds(self, stage: str) -> float:
        """Seconds of one of `STAGES`, or of the whole step (`total`)."""
        return float(getattr(self, f"{stage}_s"))


@dataclass(frozen=True, slots=True)
class SidesTime(StepTime):
    """Seconds of a step by stage in a run with generation ranks.

    The generation side generates and judges, the training side computes old log-probs and updates;
    both take part in the sync. On-policy (staleness 0) they alternate. Otherwise they work at the
    same time, on batches that are `max_staleness` = k steps apart, and weights are sent every k
    steps, so that `sync_s` is a step's share of a transfer:

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
        """Work of the generation side, without the sync."""
        return self.generation_s + self.reward_s

    @property
    def learning_s(self) -> float:
        """Work of the training side, without the sync."""
        return self.old_log_probs_s + self.update_s

    @property
    def training_waits_s(self) -> float:
        """Seconds of a step that the training side waits for a batch."""
        return self.total_s - self.sync_s - self.learning_s

    @property
    def generation_waits_s(self) -> float:
        """Seconds of a step that the generation side waits for weights."""
        return self.total_s - self.sync_s - self.generating_s

    def at(self, max_staleness: int) -> SidesTime:
        """The times of the same run at another staleness."""
        transfer_s = self.sync_s * max(1, self.max_staleness)
        sync_s = transfer_s / max(1, max_staleness)
        return replace(self, max_staleness=max_staleness, sync_s=sync_s)


def step_of(training: Training, *, generation_s: float) -> StepTime:
    """Times of a step whose generation takes `generation_s` seconds.

    Returns:
        `SidesTime` if the layout has generation ranks.
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
    """Predict the times of one step.

    Args:
        hf_config: the model's config, or its `Shape`.
        config: the run's settings; parallel sizes come from `layout`.
        layout: how the run is divided.
        workload: lengths of a step.
        gpu: device.
        efficiency: share of the device's peaks that is reached.
    """
    shape = hf_config if isinstance(hf_config, Shape) else Shape.of(hf_config)
    training = Training(shape, config, layout, workload, gpu, efficiency)
    return step_of(training, generation_s=generation_s(training))


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding steps of one vLLM replica."""

    shape: Shape
    tp_size: int
    element_bytes: int
    flops: float
    """Peak of the products at the engine's precision."""
    gpu: Gpu
    efficiency: Efficiency
    quantized: bool = False
    """Whether the layers' weights are in fp8, a byte each; head, attention and KV cache are not.
    (Approximation: the router counts as fp8, padding of experts is left out; `engine_bytes` counts
    both correctly.)"""

    @property
    def layer_speed(self) -> float:
        """Peak of the products with the layers' weights, as a multiple of `flops`."""
        return self.gpu.fp8_flops / self.flops if self.quantized else 1.0

    def step_s(self, running: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of one decoding step for `running` sequences with `context` tokens each.

        All three are float64 arrays [n].

            bytes = weights read + running x context x KV bytes of a token
            flops = running x (2 x active weights + 4 x context x layers x heads_width),
                    with quantised weights counted x bf16 peak / fp8 peak, and in windowed
                    layers only the context within the window
            step  = max(bytes / bandwidth, flops / products) + all-reduces
                    + decode_step_s + running x decode_sequence_s

        Every weight is read once, and every expert that at least one token chooses. If b tokens
        choose k of E experts uniformly, that is a share of 1 - (1 - k/E)^b.
        """
        shape, gpu, efficiency = self.shape, self.gpu, self.efficiency
        experts = np.zeros_like(running)
        if shape.num_experts:
            missed = 1 - shape.experts_per_token / shape.num_experts
            all_experts = shape.num_sparse * shape.num_experts * shape.expert_weights
            experts = all_experts * (1 - missed**running)
        layer_weights = shape.common_weights + experts
        weight_bytes = layer_weights * (1 if self.quantized else self.element_bytes)
        weight_bytes = (weight_bytes + shape.head_weights * self.element_bytes) / self.tp_size
        kv_bytes = shape.kv_bytes_per_token(element_bytes=self.element_bytes, tp_size=self.tp_size)
        memory_s = weight_bytes + running * context * kv_bytes
        memory_s = memory_s / (gpu.bandwidth * efficiency.bandwidth)
        layers = shape.active_weights / self.layer_speed
        products = 2 * (layers + shape.head_weights)
        seen = (shape.num_layers - shape.num_windowed) * context
        seen = seen + shape.num_windowed * np.minimum(context, shape.window)
        attention = 4 * seen * shape.heads_width
        compute_s = running * (products + attention) / self.tp_size
        compute_s = compute_s / (self.flops * efficiency.matmul)
        overhead_s = efficiency.decode_step_s + running * efficiency.decode_sequence_s
        return np.maximum(memory_s, compute_s) + overhead_s + self._collectives_s(running)

    def _collectives_s(self, running: np.ndarray) -> np.ndarray:
        """Two all-reduces per layer of running x hidden elements; each sends 2 (t-1)/t of them."""
        if self.tp_size == 1:
            return np.zeros_like(running)
        sent = 2 * (self.tp_size - 1) / self.tp_size * running * self.shape.hidden
        rate = self.gpu.group_bandwidth(self.tp_size, stride=1) * self.efficiency.communication
        each = sent * self.element_bytes / rate + self.efficiency.collective_s
        return 2 * self.shape.num_layers * each


def generation_s(training: Training) -> float:
    """Seconds from the first prompt to the last response of a step's rollouts.

    Rounds of dynamic sampling follow one another, each with its own longest response. A round that
    only some steps need counts by that share of steps:

        generation = sum over rounds of min(1, prompts) x batch(max(1, prompts))

    In one batch a replica has n sequences, of which n P(L > t) still run at step t. The batch ends
    with the longest of all N sequences of the run, so step t takes place with probability
    1 - (1 - P(L > t))^N, on a replica that then runs max(1, n P(L > t)) sequences:

        decode = sum over t of (1 - (1 - P(L > t))^N) x step(max(1, n P(L > t)), prompt + t)

    If the KV cache (or vLLM's own limit) holds only b < n sequences, b run until none waits:
    (n - b) E L / b steps at a mean response length of E L^2 / (2 E L). The rest of the last b
    follows P(rest > t) = integral of P(L > u) from t on, / E L.

    A prompt is computed once for its k responses (vLLM's prefix cache).

    Returns:
        Infinity if the KV cache does not hold one sequence of the maximum length.
    """
    shape, config, gpu = training.shape, training.config, training.gpu
    tp_size = training.layout.rollout_tp_size
    decoding = Decoding(
        shape=shape,
        tp_size=tp_size,
        element_bytes=element_bytes(config),
        # With an fp8 trainer, the engine computes in bfloat16 whatever it does not quantise.
        flops=gpu.flops("fp32" if config.model.precision == "fp32" else "bf16"),
        gpu=gpu,
        efficiency=training.efficiency,
        quantized=bool(config.rollout.quantization),
    )
    kv_tokens = kv_cache_tokens(shape, config, gpu, rollout_tp_size=tp_size)
    if not holds_one_sequence(kv_tokens, config):
        return float("inf")
    return sum(
        min(1.0, prompts)
        * _batch_s(
            decoding,
            training.workload,
            num_prompts=max(1.0, prompts),
            rollouts_per_prompt=config.batch.rollouts_per_prompt,
            replicas=max(1, training.layout.rollout_replicas),
            kv_tokens=kv_tokens,
        )
        for prompts in training.workload.prompts_by_round(config.batch)
    )


def _batch_s(
    decoding: Decoding,
    workload: Workload,
    *,
    num_prompts: float,
    rollouts_per_prompt: int,
    replicas: int,
    kv_tokens: float,
) -> float:
    """Seconds of one batch; see `generation_s`. `kv_tokens`: capacity of a replica's KV cache."""
    # Sequences of the busiest replica, and how many of them vLLM runs at once.
    gpu = decoding.gpu
    prompts = math.ceil(num_prompts / replicas)
    waiting = prompts * rollouts_per_prompt
    lengths, survival = workload.survival()
    prompt, mean = workload.mean_prompt_tokens, workload.mean_response_tokens
    aged = workload.mean_squared_response / (2 * mean)
    most = _MAX_SEQUENCES if gpu.memory_bytes >= 70 * GIB else _MAX_SEQUENCES_SMALL
    if gpu.name == CPU_NAME:
        most = _MAX_SEQUENCES_SMALL * decoding.tp_size

    # While sequences wait, a full batch runs; afterwards the last ones finish.
    full_s, running = 0.0, float(waiting)
    peak_tokens = float((waiting * survival * (prompt + lengths)).max())
    if waiting > most or peak_tokens > kv_tokens:
        running = float(max(1.0, min(waiting, most, kv_tokens / (prompt + aged))))
        steps = (waiting - running) * mean / running
        one_s = decoding.step_s(np.array([running]), np.array([prompt + aged]))
        full_s = steps * float(one_s[0])
        if steps > 0:
            rest = survival[::-1].cumsum()[::-1]
            survival = rest / rest[0]

    # The tail: steps take place while any sequence of the run is unfinished.
    width = workload.longest_response_tokens / len(lengths)
    num_running = min(running * replicas, num_prompts * rollouts_per_prompt)
    takes_place = 1 - (1 - survival) ** num_running
    steps_s = decoding.step_s(np.maximum(running * survival, 1.0), prompt + lengths)
    decode_s = float((takes_place * steps_s).sum() * width)

    prefill = forward_flops(
        decoding.shape,
        num_tokens=prompts * prompt,
        mean_squared_length=prompt**2,
        num_sequences=prompts,
        num_scored=prompts,
    )
    prefill_flops = prefill.layers / decoding.layer_speed + prefill.attention + prefill.head
    prefill_s = prefill_flops / decoding.tp_size
    prefill_s /= decoding.flops * decoding.efficiency.matmul
    return prefill_s + full_s + decode_s


def reward_s(training: Training) -> float:
    """Verdicts: sequences of a rank x verdict_s / its workers. Every generating rank judges."""
    config = training.config
    cores = (os.cpu_count() or 1) if training.gpu.name == CPU_NAME else _MOST_WORKERS
    workers = config.reward.num_workers or min(_MOST_WORKERS, max(1, cores))
    prompts = sum(training.workload.prompts_by_round(config.batch))
    sequences = prompts * config.batch.rollouts_per_prompt / training.layout.rollout_ranks
    return sequences * training.efficiency.verdict_s / workers
