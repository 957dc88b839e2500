"""Seconds that vLLM takes to generate one rollout batch, with the tail of long responses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapo_megatron.config import Config
from gapo_megatron.scaling.arithmetic import Shape, forward_flops
from gapo_megatron.scaling.efficiency import Efficiency
from gapo_megatron.scaling.hardware import CPU_NAME, GIB, Gpu
from gapo_megatron.scaling.workload import Workload

_MAX_SEQUENCES = 1024
"""vLLM's own limit on the sequences it runs at once, on devices of 70 GiB and more (0.32)."""
_MAX_SEQUENCES_SMALL = 256


@dataclass(frozen=True, slots=True)
class Decoding:
    """One replica's decoding steps."""

    shape: Shape
    tp_size: int
    element_bytes: int
    flops: float
    """Peak of the products at the engine's precision."""
    gpu: Gpu
    efficiency: Efficiency

    def step_s(self, running: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of one step [n], of `running` [n] sequences with `context` [n] tokens each.

            bytes = weights met + running x context x KV bytes of a token
            flops = running x (2 x active weights + 4 x context x layers x heads_width)
            step  = max(bytes / bandwidth, flops / products) + all-reduces
                    + decode_step_s + running x decode_sequence_s

        Every weight is read once, of experts those that at least one token meets: with b tokens
        and k of E experts each, taken evenly, a share of 1 - (1 - k/E)^b.
        """
        shape, gpu, efficiency = self.shape, self.gpu, self.efficiency
        experts = np.zeros_like(running)
        if shape.num_experts:
            missed = 1 - shape.experts_per_token / shape.num_experts
            experts = shape.num_experts * shape.expert_weights * (1 - missed**running)
        weights = shape.num_layers * (shape.layer_weights + experts) + shape.head_weights
        weight_bytes = weights * self.element_bytes / self.tp_size
        kv_bytes = shape.kv_bytes_per_token(element_bytes=self.element_bytes, tp_size=self.tp_size)
        memory_s = weight_bytes + running * context * kv_bytes
        memory_s = memory_s / (gpu.bandwidth * efficiency.bandwidth)
        products = 2 * (shape.num_layers * shape.active_layer_weights + shape.head_weights)
        attention = 4 * context * shape.num_layers * shape.heads_width
        compute_s = running * (products + attention) / self.tp_size
        compute_s = compute_s / (self.flops * efficiency.matmul)
        overhead_s = efficiency.decode_step_s + running * efficiency.decode_sequence_s
        return np.maximum(memory_s, compute_s) + overhead_s + self._collectives_s(running)

    def _collectives_s(self, running: np.ndarray) -> np.ndarray:
        """Two all-reduces a layer of running x hidden elements, each sending 2 (t-1)/t of them."""
        if self.tp_size == 1:
            return np.zeros_like(running)
        sent = 2 * (self.tp_size - 1) / self.tp_size * running * self.shape.hidden
        rate = self.gpu.group_bandwidth(self.tp_size, stride=1) * self.efficiency.communication
        each = sent * self.element_bytes / rate + self.efficiency.collective_s
        return 2 * self.shape.num_layers * each


def generation_s(
    shape: Shape,
    config: Config,
    *,
    rollout_tp_size: int,
    world_size: int,
    workload: Workload,
    gpu: Gpu,
    efficiency: Efficiency,
    kv_cache_bytes: float,
) -> float:
    """Seconds from the first prompt to the last response of a rollout batch.

    A replica has n sequences, of which n P(L > t) still run at step t. The batch ends with the
    longest of all N sequences of the run, so step t takes place with probability
    1 - (1 - P(L > t))^N, in a replica that then has max(1, n P(L > t)) of them:

        decode = sum over t of (1 - (1 - P(L > t))^N) x step(max(1, n P(L > t)), prompt + t)

    Where the KV cache (or vLLM's own limit) holds only b < n sequences, b are kept running until
    none waits, (n - b) E L / b steps at a mean response of E L^2 / (2 E L); what is left of the
    last b follows P(rest > t) = integral of P(L > u) from t on, / E L.

    Prompts are computed once for their k responses (vLLM's prefix cache).

    Args:
        shape: of the model.
        config: of the run.
        rollout_tp_size: ranks of a replica.
        world_size: ranks of the run.
        workload: lengths.
        gpu: device.
        efficiency: what is reached of it.
        kv_cache_bytes: of one rank.

    Returns:
        Infinity where the cache does not hold one sequence of the greatest length.
    """
    batch, element_bytes = config.batch, 4 if config.model.precision == "fp32" else 2
    replicas = max(1, world_size // rollout_tp_size)
    prompts = -(-batch.rollout_prompts // replicas)
    waiting = prompts * batch.rollouts_per_prompt
    decoding = Decoding(
        shape=shape,
        tp_size=rollout_tp_size,
        element_bytes=element_bytes,
        # The engine computes in bfloat16 where the trainer has fp8.
        flops=gpu.flops("fp32" if config.model.precision == "fp32" else "bf16"),
        gpu=gpu,
        efficiency=efficiency,
    )
    lengths, survival = workload.survival()
    prompt, mean = workload.mean_prompt_tokens, workload.mean_response_tokens
    kv_bytes = shape.kv_bytes_per_token(element_bytes=element_bytes, tp_size=rollout_tp_size)
    kv_tokens = kv_cache_bytes / kv_bytes
    aged = workload.mean_squared_response / (2 * mean)
    most = _MAX_SEQUENCES if gpu.memory_bytes >= 70 * GIB else _MAX_SEQUENCES_SMALL
    if gpu.name == CPU_NAME:
        most = _MAX_SEQUENCES_SMALL * rollout_tp_size
    # vLLM starts if the cache holds `max_model_len` tokens (`rollout.arguments.engine_args`).
    if kv_tokens < config.max_sequence_tokens + 1:
        return float("inf")

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
    width = workload.longest_response_tokens / len(lengths)
    takes_place = 1 - (1 - survival) ** (running * replicas)
    steps_s = decoding.step_s(np.maximum(running * survival, 1.0), prompt + lengths)
    decode_s = float((takes_place * steps_s).sum() * width)

    prefill = forward_flops(
        shape,
        num_tokens=prompts * prompt,
        mean_squared_length=prompt**2,
        num_sequences=prompts,
        num_scored=prompts,
    )
    prefill_s = prefill.total / rollout_tp_size / (decoding.flops * efficiency.matmul)
    return prefill_s + full_s + decode_s
