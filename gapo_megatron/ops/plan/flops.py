"""Sizes of a model from its config.json: floating-point operations, vLLM's weights, KV cache.

A product of [m, k] and [k, n] counts 2 m k n. Norms, rotary embeddings, softmax and expert routing
are left out (below 1 % for hidden sizes of 1,536 and more); the embedding is a look-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gapo_megatron.config import Config, ParallelConfig
from gapo_megatron.models.lora import factors_of
from gapo_megatron.models.rules import Rule
from gapo_megatron.models.tables import geometry_of, rules_for
from gapo_megatron.ops.plan.hardware import CPU_NAME, GIB, Gpu
from gapo_megatron.ops.plan.layout import Layout, per_rank_parameters, trained_rules
from gapo_megatron.ops.plan.workload import Workload


def element_bytes(config: Config) -> int:
    """Bytes of a weight or an activation: fp8 runs store bfloat16 and cast for each product."""
    return 4 if config.model.precision == "fp32" else 2


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM 0.32 has room: a copy of `compat.vllm.adapter_ranks`, which imports it."""


def engine_bytes(shape: Shape, config: Config, gpu: Gpu, *, rollout_tp_size: int) -> float:
    """Bytes of vLLM's weights on one rank of a replica, and of its room for an adapter's factors.

    Under `rollout.quantization` the layers' weights, except the router's, take a byte each, and an
    expert's width on a rank is padded to blocks of 128. Scales (4 bytes per 128 x 128 weights) are
    left out.
    """
    size = shape.num_parameters * element_bytes(config) / rollout_tp_size
    if sends_factors(shape, config, gpu):
        return size + factor_room_bytes(shape, config, rollout_tp_size=rollout_tp_size)
    if not config.rollout.quantization:
        return size
    routed = shape.num_sparse * shape.num_experts
    others = (shape.common_weights - routed * shape.hidden) / rollout_tp_size
    experts = routed * shape.expert_weights / rollout_tp_size
    blocks = math.ceil(shape.expert_weights / (3 * shape.hidden) / rollout_tp_size / 128)
    filled_up = routed * 3 * shape.hidden * 128 * blocks
    return size - (others + experts) * element_bytes(config) + others + filled_up


def factor_room_bytes(shape: Shape, config: Config, *, rollout_tp_size: int) -> int:
    """Bytes that vLLM 0.32 allocates on one rank for the factors of one adapter.

    Beside every layer that it fuses each part (query, key and value; gate and up projection) has an
    A of its own. Beside a column-parallel layer A is whole and B sharded like the weight, with the
    heads of key and value that a rank holds; beside a row-parallel one A is sharded and B whole.
    Both have the next rank of `ADAPTER_RANKS`.
    """
    adapter, tp_size = config.adapter, rollout_tp_size
    width = 0
    for one in factors_of(shape.rules, targets=adapter.targets, rank=adapter.rank):
        for part, (num_rows, num_columns) in enumerate(one.weight.hf_shapes):
            copies = max(1, tp_size // shape.kv_heads) if one.target == "qkv" and part > 0 else 1
            rows, columns = num_rows * copies // tp_size, num_columns
            if one.weight.tp_dim == 1:
                rows, columns = num_rows, num_columns // tp_size
            width += (rows + columns) * len(one.weight.layers)
    rank = min(rank for rank in ADAPTER_RANKS if rank >= adapter.rank)
    return width * rank * element_bytes(config)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that determine the work per token. Weights: elements, without biases and norms."""

    num_layers: int
    hidden: int
    heads_width: int
    """Query heads x head_dim; of values that are smaller than queries, the mean of both."""
    kv_heads: int
    head_dim: int
    latent_width: int
    """Elements of a token in a layer's KV cache under latent attention; 0: keys and values."""
    vocab: int
    tied: bool
    """Whether the output layer shares the embedding's weights."""
    layer_weights: int
    """Weights of the last layer that every token uses: attention, and the MLP, or the router and
    a shared expert."""
    first_weights: int
    """The same of the first layer, which differs from the last if `num_dense` > 0."""
    num_dense: int
    """First layers that have an MLP in a model with experts."""
    expert_weights: int
    """Weights of one expert of one layer; 0 in a dense model."""
    num_experts: int
    experts_per_token: int
    has_shared_expert: bool
    window: int
    """Keys that a query of a windowed layer sees."""
    num_windowed: int
    """Layers with the window."""
    num_tensors: int
    """Tensors of the Hugging Face checkpoint."""
    num_parameters: int
    """All parameters; a tied output layer counts once."""
    rules: tuple[Rule, ...] = field(compare=False, repr=False)
    """Name rules of the parameters; not compared, since the sizes above identify the model."""

    @classmethod
    def of(cls, hf_config: Any) -> Shape:
        """Read a Hugging Face config (any object with its attributes).

        Raises:
            ConfigError: see `models.tables.rules_for`.
        """
        g, rules = geometry_of(hf_config), rules_for(hf_config)
        own = [rule for rule in rules if not rule.tied]
        first, last = ([one for one in own if at in one.layers] for at in (0, g.num_layers - 1))
        return cls(
            num_layers=g.num_layers,
            hidden=g.hidden,
            heads_width=g.heads * (g.head_dim + g.value_dim) // 2,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            latent_width=g.latent.key_value + g.latent.rope if g.latent else 0,
            vocab=g.vocab,
            tied=g.tied,
            layer_weights=_matrix_elements(rule for rule in last if not rule.num_experts),
            first_weights=_matrix_elements(rule for rule in first if not rule.num_experts),
            num_dense=g.num_dense,
            expert_weights=_matrix_elements(rule for rule in last if rule.num_experts),
            num_experts=g.num_experts,
            experts_per_token=g.experts_per_token,
            has_shared_expert=g.shared_intermediate > 0,
            window=g.window,
            num_windowed=sum(g.windowed),
            num_tensors=sum(len(rule.hf) * rule.num_places for rule in own),
            num_parameters=sum(per_rank_parameters(rules, ParallelConfig())),
            rules=tuple(rules),
        )

    @property
    def num_sparse(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.num_dense if self.num_experts else 0

    @property
    def common_weights(self) -> int:
        """Weights of all layers that every token uses."""
        others = (self.num_layers - self.num_dense) * self.layer_weights
        return others + self.num_dense * self.first_weights

    @property
    def active_weights(self) -> int:
        """Weights of all layers that multiply one token."""
        chosen = self.num_sparse * self.experts_per_token * self.expert_weights
        return self.common_weights + chosen

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    def kv_bytes_per_token(self, *, element_bytes: int, tp_size: int = 1) -> int:
        """Bytes of one token's keys and values on one rank; ranks beyond the KV heads copy one.

        Of windowed layers vLLM frees what lies behind the window; that is not counted on. Latent
        vectors are whole on every rank.
        """
        if self.latent_width:
            return self.num_layers * self.latent_width * element_bytes
        heads = max(1, -(-self.kv_heads // tp_size))
        return 2 * self.num_layers * heads * self.head_dim * element_bytes


def kv_cache_bytes(shape: Shape, config: Config, gpu: Gpu, *, rollout_tp_size: int) -> float:
    """Bytes of vLLM's KV cache on one rank, including its workspace.

    The `rollout.memory_fraction` of the GPU less `engine_bytes`; on a CPU
    `rollout.cpu_kv_cache_gib`.
    """
    if gpu.name == CPU_NAME:
        return float(config.rollout.cpu_kv_cache_gib * GIB)
    weights = engine_bytes(shape, config, gpu, rollout_tp_size=rollout_tp_size)
    return max(0.0, config.rollout.memory_fraction * gpu.memory_bytes - weights)


def kv_cache_tokens(shape: Shape, config: Config, gpu: Gpu, *, rollout_tp_size: int) -> float:
    """Capacity of a replica's KV cache in tokens."""
    token_bytes = shape.kv_bytes_per_token(
        element_bytes=element_bytes(config), tp_size=rollout_tp_size
    )
    return kv_cache_bytes(shape, config, gpu, rollout_tp_size=rollout_tp_size) / token_bytes


def sends_factors(shape: Shape, config: Config, gpu: Gpu) -> bool:
    """Whether a weight sync brings vLLM an adapter's factors alone.

    Otherwise it brings whole weights, merged with the adapter if there is one
    (`rollout.vllm.adapter.why_merged`).
    """
    adapter, on_cpu = config.adapter, gpu.name == CPU_NAME
    is_merged = shape.num_experts > 0 if on_cpu else config.model.precision == "fp32"
    is_merged |= "experts" in adapter.targets or bool(config.rollout.quantization)
    is_merged |= shape.latent_width > 0
    return adapter.kind != "none" and not is_merged


def kept_asleep_bytes(shape: Shape, config: Config, layout: Layout, gpu: Gpu) -> float:
    """Host bytes of what a rank's sleeping engine keeps (vLLM's sleep level 1): `engine_bytes`.

    0 if a sync brings whole weights, on generation ranks, which never sleep, and on a CPU.
    """
    is_asleep = not layout.num_generation and gpu.name != CPU_NAME
    if not is_asleep or not sends_factors(shape, config, gpu):
        return 0.0
    return engine_bytes(shape, config, gpu, rollout_tp_size=layout.rollout_tp_size)


def holds_one_sequence(kv_tokens: float, config: Config) -> bool:
    """Whether a KV cache of `kv_tokens` tokens holds one sequence of the maximum length.

    VLLM refuses to start unless it holds `max_model_len` (`rollout.vllm.arguments.engine_args`).
    """
    return kv_tokens >= config.max_sequence_tokens + 1


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Floating-point operations of one forward pass by part."""

    layers: float
    """Products with the layers' weights: 2 x active parameters x tokens."""
    attention: float
    """Scores, and their products with values; only the causal half."""
    head: float
    """Logits of the scored positions."""

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head


def forward_flops(
    hf_config: Any | Shape,
    *,
    num_tokens: float,
    mean_squared_length: float,
    num_sequences: float,
    num_scored: float | None = None,
) -> ForwardFlops:
    """Operations of a forward pass over packed sequences.

        layers    = 2 x num_tokens x active_weights
        attention = 2 x num_sequences x mean_squared_length x num_layers x heads_width
        head      = 2 x num_scored x vocab x hidden

    Attention is causal: a sequence of L tokens has L^2 / 2 pairs, each used twice (scores, values).
    In a layer with a window of w < L keys it has L w - w^2 / 2, here of the root mean square of L.

    Args:
        hf_config: the model's config, or its `Shape`.
        num_tokens: tokens fed to the model.
        mean_squared_length: mean squared length of the sequences, in tokens squared.
        num_sequences: sequences that these tokens belong to.
        num_scored: positions whose log-prob is computed; None for all.
    """
    shape = hf_config if isinstance(hf_config, Shape) else Shape.of(hf_config)
    scored = num_tokens if num_scored is None else num_scored
    # Twice the pairs of a sequence, summed over the layers.
    longest = math.sqrt(mean_squared_length)
    seen = min(longest, shape.window)
    pairs = (shape.num_layers - shape.num_windowed) * mean_squared_length
    pairs += shape.num_windowed * (2 * longest * seen - seen**2)
    return ForwardFlops(
        layers=2.0 * num_tokens * shape.active_weights,
        attention=2.0 * num_sequences * pairs * shape.heads_width,
        head=2.0 * scored * shape.head_weights,
    )


def adapter_flops(shape: Shape, config: Config, *, num_tokens: float) -> float:
    """Operations of an adapter's factors in a forward pass: 2 x those that multiply a token."""
    if config.adapter.kind == "none":
        return 0.0
    weights = sum(
        math.prod(rule.full_shape)
        * (len(rule.layers) or 1)
        * (shape.experts_per_token if rule.num_experts else 1)
        for rule in trained_rules(shape.rules, config.adapter)
    )
    return 2.0 * num_tokens * weights


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of one step, summed over all ranks."""

    generation: float
    old_log_probs: float
    update: float

    @property
    def total(self) -> float:
        return self.generation + self.old_log_probs + self.update


def step_flops(
    shape: Shape, config: Config, workload: Workload, *, num_prompts: float | None = None
) -> StepFlops:
    """Model FLOPs of a step, for MFU.

        generation = forward of every prompt once for its k responses, and of every response token
        old        = (m - 1) / m forward passes of the rows with A != 0; 1 more with a KL term
        update     = 3 x (layers + attention) + (1 + 2 x (1 - clipped share)) x head, of those rows

    with m mini-batches. With an adapter the gradients of frozen weights are left out: 2 x layers,
    and 1 x (1 - clipped share) of the head; the factors count once in an old pass and three times
    in an update. Repeated work does not count (recomputation, flash attention's scores, the head's
    logits), nor does skipped work (A = 0, clipped).

    Args:
        shape: the model's shape.
        config: the run's settings.
        workload: lengths of the step.
        num_prompts: prompts of the step; None: the average over dynamic sampling's rounds.
    """
    # Generation: prompts once for their k responses, then every response token.
    batch, prompt = config.batch, workload.mean_prompt_tokens
    if num_prompts is None:
        num_prompts = sum(workload.prompts_by_round(batch))
    prompts = forward_flops(
        shape,
        num_tokens=num_prompts * prompt,
        mean_squared_length=prompt**2,
        num_sequences=num_prompts,
        num_scored=num_prompts,
    )
    num_responses = num_prompts * batch.rollouts_per_prompt
    responses = forward_flops(
        shape,
        num_tokens=num_responses * workload.mean_response_tokens,
        mean_squared_length=workload.mean_squared_tokens - prompt**2,
        num_sequences=num_responses,
    )

    # Training: sequences with A != 0, unless the objective needs all of them.
    share = 1.0 if config.objective.needs_every_sequence else workload.trained_share(batch)
    num_trained = batch.rollout_prompts * batch.rollouts_per_prompt * share
    trained = forward_flops(
        shape,
        num_tokens=num_trained * workload.mean_tokens,
        mean_squared_length=workload.mean_squared_tokens,
        num_sequences=num_trained,
        num_scored=num_trained * workload.mean_response_tokens,
    )
    num_passes = 1 - 1 / batch.num_minibatches + (config.objective.kl_coef > 0)
    is_full = config.adapter.kind == "none"
    factors = adapter_flops(shape, config, num_tokens=num_trained * workload.mean_tokens)
    head = (1 + (1 + is_full) * (1 - workload.clipped_share)) * trained.head
    return StepFlops(
        generation=prompts.total + responses.total,
        old_log_probs=num_passes * (trained.total + factors),
        update=(2 + is_full) * trained.layers + 3 * (trained.attention + factors) + head,
    )


def _matrix_elements(rules: Iterable[Rule]) -> int:
    """Elements of the matrices of one layer and one expert, without biases and norms."""
    return sum(math.prod(rule.full_shape) for rule in rules if len(rule.full_shape) > 1)
