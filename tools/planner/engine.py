"""The vLLM engine of a layout: bytes of its weights and KV cache, seconds of its decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gapo_megatron.config import Config
from gapo_megatron.config.rules import why_merged
from gapo_tools.planner.flops import Shape, element_bytes, forward_flops
from gapo_tools.planner.hardware import Efficiency, Gpu
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.state import trained_rules
from gapo_tools.planner.training import Training
from gapo_tools.planner.workload import survival

_MAX_SEQUENCES = 1024
"""vLLM's default limit on concurrent sequences, on devices of 70 GiB and more (0.32)."""


def engine_bytes(shape: Shape, config: Config, *, rollout_tp_size: int) -> float:
    """Bytes of vLLM's weights on one rank of a replica, and of an adapter's whole factors.

    Under `rollout.quantization` the layers' weights take a byte each; that routers do not, scales
    and padding are left out.
    """
    size = shape.num_parameters * element_bytes(config) / rollout_tp_size
    if sends_factors(shape, config):
        return size + factor_elements(shape, config) * element_bytes(config)
    if not config.rollout.quantization:
        return size
    experts = shape.num_sparse * shape.num_experts * shape.expert_weights
    layers = (shape.common_weights + experts) / rollout_tp_size
    return size - layers * (element_bytes(config) - 1)


def kv_cache_bytes(shape: Shape, config: Config, gpu: Gpu, *, rollout_tp_size: int) -> float:
    """Bytes of vLLM's KV cache on one rank, including its workspace.

    The `rollout.memory_fraction` of the GPU less `engine_bytes`.
    """
    weights = engine_bytes(shape, config, rollout_tp_size=rollout_tp_size)
    return max(0.0, config.rollout.memory_fraction * gpu.memory_bytes - weights)


def kv_cache_tokens(shape: Shape, config: Config, gpu: Gpu, *, rollout_tp_size: int) -> float:
    """Capacity of a replica's KV cache in tokens."""
    token_bytes = shape.kv_bytes_per_token(
        element_bytes=element_bytes(config), tp_size=rollout_tp_size
    )
    return kv_cache_bytes(shape, config, gpu, rollout_tp_size=rollout_tp_size) / token_bytes


def sends_factors(shape: Shape, config: Config) -> bool:
    """Whether a weight sync brings vLLM an adapter's factors alone.

    Otherwise it brings whole weights, merged with the adapter if there is one.
    """
    why = why_merged(
        config,
        has_experts=shape.num_experts > 0,
        has_latent=shape.latent_width > 0,
        device="cuda",
    )
    return config.adapter.kind != "none" and not why


def factor_elements(shape: Shape, config: Config) -> int:
    """Elements of an adapter's factors, of all layers and experts."""
    rules = trained_rules(shape.rules, config.adapter)
    return sum(math.prod(rule.full_shape) * rule.num_places for rule in rules)


def kept_asleep_bytes(shape: Shape, config: Config, layout: Layout) -> float:
    """Host bytes of what a rank's sleeping engine keeps (vLLM's sleep level 1): `engine_bytes`.

    0 if a sync brings whole weights, and on generation ranks, which never sleep.
    """
    if layout.num_generation or not sends_factors(shape, config):
        return 0.0
    return engine_bytes(shape, config, rollout_tp_size=layout.rollout_tp_size)


def holds_one_sequence(kv_tokens: float, config: Config) -> bool:
    """Whether a KV cache of `kv_tokens` tokens holds one sequence of the maximum length.

    VLLM refuses to start unless it holds `max_model_len` (`rollout.vllm.arguments.engine_args`).
    """
    return kv_tokens >= config.max_sequence_tokens + 1


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
    As in `engine_bytes`, the router counts as fp8."""

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
        return math.inf
    return sum(
        min(1.0, prompts) * _batch_s(training, decoding, max(1.0, prompts), kv_tokens)
        for prompts in training.workload.prompts_by_round(config.batch)
    )


def _batch_s(training: Training, decoding: Decoding, num_prompts: float, kv_tokens: float) -> float:
    """Seconds of one batch; see `generation_s`. `kv_tokens`: capacity of a replica's KV cache."""
    # Sequences of the busiest replica, and how many of them vLLM runs at once.
    workload, replicas = training.workload, max(1, training.layout.rollout_replicas)
    rollouts_per_prompt = training.config.batch.rollouts_per_prompt
    prompts = math.ceil(num_prompts / replicas)
    waiting = prompts * rollouts_per_prompt
    lengths, running_share = survival(workload)
    prompt, mean = workload.mean_prompt_tokens, workload.mean_response_tokens
    aged = workload.mean_squared_response / (2 * mean)

    # While sequences wait, a full batch runs; afterwards the last ones finish.
    full_s, running = 0.0, float(waiting)
    peak_tokens = float((waiting * running_share * (prompt + lengths)).max())
    if waiting > _MAX_SEQUENCES or peak_tokens > kv_tokens:
        running = float(max(1.0, min(waiting, _MAX_SEQUENCES, kv_tokens / (prompt + aged))))
        steps = (waiting - running) * mean / running
        one_s = decoding.step_s(np.array([running]), np.array([prompt + aged]))
        full_s = steps * float(one_s[0])
        if steps > 0:
            rest = running_share[::-1].cumsum()[::-1]
            running_share = rest / rest[0]

    # The tail: steps take place while any sequence of the run is unfinished.
    width = workload.longest_response_tokens / len(lengths)
    num_running = min(running * replicas, num_prompts * rollouts_per_prompt)
    takes_place = 1 - (1 - running_share) ** num_running
    steps_s = decoding.step_s(np.maximum(running * running_share, 1.0), prompt + lengths)
    decode_s = float((takes_place * steps_s).sum() * width)

    prefill = forward_flops(
        decoding.shape,
        num_tokens=prompts * prompt,
        mean_squared_length=prompt**2,
        num_sequences=prompts,
        num_scored=prompts,
    )
    products = prefill.layers / decoding.layer_speed + prefill.attention + prefill.head
    rate = decoding.tp_size * decoding.flops * decoding.efficiency.matmul
    return products / rate + full_s + decode_s
