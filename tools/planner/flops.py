"""Sizes of a model from its config.json, and its floating-point operations.

A product of [m, k] and [k, n] counts 2 m k n. Norms, rotary embeddings, softmax and expert routing
are left out (below 1 % for hidden sizes of 1,536 and more); the embedding is a look-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gapo_megatron.config import Config, ParallelConfig
from gapo_megatron.models.rules import Rule
from gapo_megatron.models.tables import geometry_of, rules_for
from gapo_tools.planner.state import per_rank_parameters, trained_rules
from gapo_tools.planner.workload import Workload


def element_bytes(config: Config) -> int:
    """Bytes of a weight or an activation: fp8 runs store bfloat16 and cast for each product."""
    return 4 if config.model.precision == "fp32" else 2


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
