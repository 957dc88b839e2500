"""Seconds that vLLM takes to generate one rollout batch, with the tail of long responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gapo_megatron.config import Config
from gapo_megatron.ops.plan.efficiency import Efficiency
from gapo_megatron.ops.plan.flops import Shape, element_bytes, engine_bytes, forward_flops
from gapo_megatron.ops.plan.hardware import CPU_NAME, GIB, Gpu
from gapo_megatron.ops.plan.workload import Workload

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
    quantized: bool = False
    """The layers' weights are in fp8, a byte each; head, attention and the cache are not. (The
    router counts as one of them, and the padding of experts not: `engine_bytes` has both right.)"""

    @property
    def layer_speed(self) -> float:
        """The peak of products with the layers' weights, as a multiple of `flops`."""
        return self.gpu.fp8_flops / self.flops if self.quantized else 1.0

    def step_s(self, running: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of one step [n], of `running` [n] sequences with `context` [n] tokens each.

            bytes = weights met + running x context x KV bytes of a token
            flops = running x (2 x active weights + 4 x context x layers x heads_width),
                    where those of quantised weights count bf16 peak / fp8 peak
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
        layer_weights = shape.num_layers * (shape.layer_weights + experts)
        weight_bytes = layer_weights * (1 if self.quantized else self.element_bytes)
        weight_bytes = (weight_bytes + shape.head_weights * self.element_bytes) / self.tp_size
        kv_bytes = shape.kv_bytes_per_token(element_bytes=self.element_bytes, tp_size=self.tp_size)
        memory_s = weight_bytes + running * context * kv_bytes
        memory_s = memory_s / (gpu.bandwidth * efficiency.bandwidth)
        layers = shape.num_layers * shape.active_layer_weights / self.layer_speed
        products = 2 * (layers + shape.head_weights)
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


def kv_cache_bytes(shape: Shape, config: Config, gpu: Gpu, *, rollout_tp_size: int) -> float:
    """Bytes that vLLM has on one rank for keys and values, its own work space included.

    Its share of the memory less the weights; on a CPU `rollout.cpu_kv_cache_gib`.
    """
    if gpu.name == CPU_NAME:
        return float(config.rollout.cpu_kv_cache_gib * GIB)
    weights = engine_bytes(shape, config, rollout_tp_size=rollout_tp_size)
    return max(0.0, config.rollout.memory_fraction * gpu.memory_bytes - weights)


def kv_cache_tokens(shape: Shape, config: Config, gpu: Gpu, *, rollout_tp_size: int) -> float:
    """Tokens that the KV cache of a replica holds."""
    token_bytes = shape.kv_bytes_per_token(
        element_bytes=element_bytes(config), tp_size=rollout_tp_size
    )
    return kv_cache_bytes(shape, config, gpu, rollout_tp_size=rollout_tp_size) / token_bytes


def holds_one_sequence(kv_tokens: float, config: Config) -> bool:
    """Whether a cache of so many tokens holds a sequence of the greatest length.

    VLLM starts only if it holds `max_model_len` tokens (`rollout.vllm.arguments.engine_args`).
    """
    return kv_tokens >= config.max_sequence_tokens + 1


def generation_s(
    shape: Shape,
    config: Config,
    *,
    rollout_tp_size: int,
    world_size: int,
    workload: Workload,
    gpu: Gpu,
    efficiency: Efficiency,
) -> float:
    """Seconds from the first prompt to the last response of a step's rollouts.

    Rounds of dynamic sampling follow one another, each with its own longest response; of one that
    is not always needed, the share of the steps that need it:

        generation = sum over rounds of min(1, prompts) x batch(max(1, prompts))

    In one batch a replica has n sequences, of which n P(L > t) still run at step t. The batch ends
    with the longest of all N sequences of the run, so step t takes place with probability
    1 - (1 - P(L > t))^N, in a replica that then has max(1, n P(L > t)) of them:

        decode = sum over t of (1 - (1 - P(L > t))^N) x step(max(1, n P(L > t)), prompt + t)

    Where the KV cache (or vLLM's own limit) holds only b < n sequences, b are kept running until
    none waits, (n - b) E L / b steps at a mean response of E L^2 / (2 E L); what is left of the
    last b follows P(rest > t) = integral of P(L > u) from t on, / E L.

    Prompts are computed once for their k responses (vLLM's prefix cache).

    Args:
        shape: the model's shape.
        config: the run's settings.
        rollout_tp_size: ranks of a replica.
        world_size: ranks of the run.
        workload: lengths.
        gpu: device.
        efficiency: what is reached of it.

    Returns:
        Infinity where the cache does not hold one sequence of the greatest length.
    """
    decoding = Decoding(
        shape=shape,
        tp_size=rollout_tp_size,
        element_bytes=element_bytes(config),
        # Where the trainer has fp8, the engine computes in bfloat16 what is not quantised.
        flops=gpu.flops("fp32" if config.model.precision == "fp32" else "bf16"),
        gpu=gpu,
        efficiency=efficiency,
        quantized=bool(config.rollout.quantization),
    )
    kv_tokens = kv_cache_tokens(shape, config, gpu, rollout_tp_size=rollout_tp_size)
    if not holds_one_sequence(kv_tokens, config):
        return float("inf")
    return sum(
        min(1.0, prompts)
        * _batch_s(
            decoding,
            workload,
            num_prompts=max(1.0, prompts),
            rollouts_per_prompt=config.batch.rollouts_per_prompt,
            replicas=max(1, world_size // rollout_tp_size),
            kv_tokens=kv_tokens,
        )
        for prompts in workload.prompts_by_round(config.batch)
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
    """One batch; see `generation_s`. `kv_tokens`: that the cache of a replica holds."""
    gpu = decoding.gpu
    prompts = math.ceil(num_prompts / replicas)
    waiting = prompts * rollouts_per_prompt
    lengths, survival = workload.survival()
    prompt, mean = workload.mean_prompt_tokens, workload.mean_response_tokens
    aged = workload.mean_squared_response / (2 * mean)
    most = _MAX_SEQUENCES if gpu.memory_bytes >= 70 * GIB else _MAX_SEQUENCES_SMALL
    if gpu.name == CPU_NAME:
        most = _MAX_SEQUENCES_SMALL * decoding.tp_size
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
