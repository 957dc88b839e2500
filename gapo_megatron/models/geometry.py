"""Sizes and features of a decoder, as architectures read them from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention."""

    query: int
    """Size of the latent vector that queries are made from; 0: from the hidden state itself."""
    key_value: int
    """Size of the one that keys and values are made from."""
    nope: int
    """Elements of a query or key head that are not rotated."""
    rope: int
    """Elements that are rotated; of keys the same in all heads."""
    value: int
    """Size of a value head."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and features of a decoder that determine tensor shapes and costs."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Size of one attention head, of queries and keys; not always hidden / heads."""
    intermediate: int
    """Width of a dense layer's MLP."""
    vocab: int
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
    """Whether query, key and value projections have biases."""
    linear_biases: bool = False
    """Whether every other linear layer has one too: output projection, experts, router."""
    sinks: bool = False
    """Whether a head's softmax has one score more, a parameter, whose share is lost."""
    head_norms: bool = False
    """Whether every query and key head is normalised."""
    latent: Latent | None = None
    """Sizes of latent attention; None: queries, keys and values are made from hidden states."""
    joint_head_norms: bool = False
    """Whether queries and keys are normalised over all heads of a token together."""
    input_norms: bool = True
    """Whether norms precede attention and MLP."""
    output_norms: bool = False
    """Whether norms follow attention and MLP, before the residual addition."""
    window: int = 0
    """Keys that a query of a windowed layer sees, its own included; 0: no layer has a window."""
    windowed: tuple[bool, ...] = ()
    """Whether each layer has the window; empty: none has."""
    embedding_scale: float = 1.0
    """Factor of the embedding, not of an output layer that is tied to it."""
    num_experts: int = 0
    """Experts in every layer but the first `num_dense`; 0: a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    """Width of one expert's MLP."""
    shared_intermediate: int = 0
    """Width of the MLP that every token uses beside its experts; 0: there is none."""
    num_dense: int = 0
    """First layers of a model with experts that have an MLP in place of experts."""
    sigmoid_router: bool = False
    """Whether the router is that of `sigmoid_experts`, with a correction bias."""
    gate_limit: float = 0.0
    """Largest value of gate and up projection before they are multiplied; 0: there is none."""

    @classmethod
    def of(cls, config: Any, **features: Any) -> Geometry:
        """Read the common sizes from config.json (any object with its attributes).

        Args:
            config: the model's config.
            features: the other fields of `Geometry`, and `head_dim` if config.json means another.
        """
        heads = config.num_attention_heads
        features = {
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            **features,
        }
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            **features,
        )

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Size of the part of a head that has rotary positions, all of it or a share."""
        return self.latent.rope if self.latent else self.head_dim

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(bool(self.num_experts) and n >= self.num_dense for n in range(self.num_layers))
