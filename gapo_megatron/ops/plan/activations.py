"""Bytes of activations that the layers keep for their backward pass.

The formulas follow the tensors that each module saves. For layers without Transformer Engine
("local") they are checked on a CPU against torch's saved-tensor hooks; for Transformer Engine's
("fused") they follow from its sources and have not been measured.

Assumptions: no dropout; attention never stores a matrix of scores (flash attention); micro-batches
need no padding; experts get equal shares of the tokens.

Sizes on one rank: q query width, k key (or value) width, n query heads, all divided by tensor
parallelism; e bytes per element. Sequence parallelism divides hidden states, context parallelism
divides everything: a rank holds its part of the tokens and, in Transformer Engine's ring of keys
and values, at most one neighbour's in addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from gapo_megatron.config import Config
from gapo_megatron.models.parts import Geometry
from gapo_megatron.models.tables import geometry_of
from gapo_megatron.ops.plan.flops import element_bytes
from gapo_megatron.ops.plan.layout import Layout

_INDEX = 8  # int64
_TILE_COLUMNS, _TILE_LOGITS = 8192, 2**24
_TILES_PER_BLOCK, _BLOCK_ROWS = 8, 4096
"""Tile and block sizes of the head on a GPU: a copy of those in `logprob.tiles.block_shape`, which
imports torch."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that one layer keeps per token, by module."""

    hidden: int
    """The layer's input, one hidden state; full recomputation keeps nothing else."""
    norms: int
    attention: int
    """Kept by the core attention, including its inputs and output."""
    mlp: int
    selective: int
    """Total under selective recomputation; `policy.model` lists the recomputed modules."""
    selective_again: int
    """Recomputed during one layer's backward pass, without core attention."""

    @property
    def all(self) -> int:
        return self.norms + self.attention + self.mlp

    def kept(self, recompute: str) -> int:
        """Bytes per token between forward and backward pass."""
        if recompute == "full":
            return self.hidden
        if recompute == "selective":
            return self.selective
        return self.all

    @classmethod
    def of(cls, hf_config: Any, config: Config, layout: Layout, *, fused: bool) -> Self:
        """Bytes per token of one layer on one rank of a layout."""
        g, tp = geometry_of(hf_config), layout.tp_size
        sp = tp if layout.sequence_parallel else 1
        e, of_norm = element_bytes(config), _norm_element_bytes(config, fused)
        hidden = e * g.hidden // sp
        q, k, n = (size // tp for size in (g.heads * g.head_dim, g.kv_heads * g.head_dim, g.heads))
        mixed, rotated, out, log_sums = e * (q + 2 * k), e * (q + k), e * q, 4 * n
        # Attention. Its output is also the projection's input; norms keep queries and keys.
        attention = mixed + rotated + out + log_sums
        recomputed = mixed + out + (e * q if g.heads > g.kv_heads else 0)  # grouped: copies
        if g.head_norms:
            attention += _norm(q, n, of_norm) + _norm(k, k // g.head_dim, of_norm)
            attention += e * (q + k) if fused else 0
            recomputed = mixed + rotated + out
            recomputed += _norm(q, n, of_norm) + _norm(k, k // g.head_dim, of_norm)
        if layout.cp_size > 1 and not fused:
            # All keys and values, the mask, and the output before and after it is rearranged; the
            # same again if attention is recomputed.
            longest = config.max_sequence_tokens
            gathered = e * layout.cp_size * 2 * k
            attention += gathered + e * longest + e * q - mixed

        # Norms and MLP or experts, and what selective recomputation repeats.
        norms = 2 * (_norm(g.hidden, 1, of_norm) // sp + hidden)
        norms += 2 * hidden if fused else 0
        # Transformer Engine's layers recompute the norm before the MLP and, in a dense layer, the
        # whole MLP; with experts only their activation, the input of their second product.
        again = hidden + _norm(g.hidden, 1, of_norm) // sp
        if g.num_experts:
            mlp = _experts(g, e, fused) // sp
            again += e * g.experts_per_token * g.expert_intermediate // sp
        else:
            mlp = e * (g.intermediate // tp) * (3 if fused else 5)
            again += mlp
        factors = _factors(config, g)
        attention += factors["qkv"] + factors["proj"]
        mlp += factors["fc1"] + factors["fc2"] + factors["experts"] // sp
        if not fused:
            return cls(hidden, norms, attention, mlp, norms + recomputed + mlp, 0)
        return cls(hidden, norms, attention, mlp, norms + attention + mlp - again, again)


@dataclass(frozen=True, slots=True)
class KeptActivations:
    """Peak bytes that autograd keeps on one rank during a step."""

    layers: int
    """Activations of the layers, for the micro-batches in flight (`num_in_flight`)."""
    recomputed: int
    """Recomputed activations of one layer during its backward pass."""
    head: int
    """Activations of final norm and log-probs; freed before the layers' backward passes."""

    @property
    def most(self) -> int:
        return self.layers + max(self.recomputed, self.head)


def kept_activations(
    hf_config: Any,
    config: Config,
    layout: Layout,
    *,
    stage: int,
    num_microbatches: int,
    fused: bool,
) -> KeptActivations:
    """Predict what is kept for micro-batches of `batch.max_tokens_per_microbatch` tokens.

    Args:
        hf_config: the model's config.
        config: the run's settings.
        layout: how the run is divided.
        stage: pipeline rank.
        num_microbatches: micro-batches of an update.
        fused: whether layers are Transformer Engine's.
    """
    layer = LayerBytes.of(hf_config, config, layout, fused=fused)
    num_layers = layout.layers_of_ranks(hf_config.num_hidden_layers)[stage] // layout.vpp_size
    tokens = tokens_per_rank(config, layout)
    in_flight = num_in_flight(layout, stage=stage, num_microbatches=num_microbatches)
    sp = layout.tp_size if layout.sequence_parallel else 1
    e, kept, head = element_bytes(config), num_layers * layer.kept(layout.recompute), 0
    if stage == 0:
        kept += _INDEX  # tokens (strictly: of the first virtual stage only)
    if not fused:  # rotary tables
        kept += 2 * e * geometry_of(hf_config).head_dim
    if stage == layout.pp_size - 1:  # final norm, the head's input; label, row, two statistics
        of_norm = _norm_element_bytes(config, fused)
        head = _norm(hf_config.hidden_size, 1, of_norm) // sp + layer.hidden * (1 + fused)
        head += 2 * _INDEX + 8
    recomputed = 0
    if layout.recompute == "full":
        # The layer's input is kept anyway; norms in float32 keep their own copy of it.
        recomputed = layer.all - layer.hidden * (fused or e == 4)
    elif layout.recompute == "selective":
        recomputed = layer.selective_again
    return KeptActivations(tokens * in_flight * kept, tokens * recomputed, tokens * head)


def num_in_flight(layout: Layout, *, stage: int, num_microbatches: int) -> int:
    """Micro-batches whose activations a rank holds at once, summed over its virtual stages.

        in flight = p - r                             one stage on rank r of p
                  = 2 (p - r - 1) + (v - 1) p + 1     v virtual stages, each with 1/v of the layers

    These are the warm-up micro-batches (Megatron-core's `get_pp_rank_microbatches`) plus the one
    whose forward pass precedes the first backward pass; at most all v m of an update.
    """
    later = layout.pp_size - stage - 1
    most = later + 1
    if layout.vpp_size > 1:
        most += later + (layout.vpp_size - 1) * layout.pp_size
    return min(most, layout.vpp_size * num_microbatches)


def neighbour_bytes(
    hf_config: Any, config: Config, layout: Layout, *, stage: int, num_microbatches: int
) -> int:
    """Bytes that the pipeline schedule holds for other stages: inputs and outputs in flight.

    The model's first stage has no input; on a first rank with virtual stages, 2 p - 1 of the
    micro-batches in flight are in that stage. The last stage has no output; on a last rank with
    virtual stages, at times no micro-batch is in that stage. With virtual stages the next input is
    received before the backward pass. Under full recomputation a stage's input is counted as its
    first layer's.
    """
    sp = layout.tp_size if layout.sequence_parallel else 1
    hidden = element_bytes(config) * hf_config.hidden_size // sp
    inputs = outputs = num_in_flight(layout, stage=stage, num_microbatches=num_microbatches)
    is_virtual = layout.vpp_size > 1
    if layout.recompute == "full":
        inputs = 0
    elif stage == 0:
        inputs -= min(2 * layout.pp_size - 1, num_microbatches) if is_virtual else inputs
    if stage > 0 and is_virtual:
        inputs += 1
    if stage == layout.pp_size - 1 and not is_virtual:
        outputs = 0
    return tokens_per_rank(config, layout) * hidden * (inputs + outputs)


def working_bytes(hf_config: Any, config: Config, layout: Layout, *, fused: bool) -> int:
    """Workspace of one layer's backward pass in addition to kept activations: an estimate.

    Gradients of the MLP's two widest tensors and of two hidden states, and the largest weight's
    gradient before it is added to its float32 buffer (a frozen weight has none). (The embedding's
    gradient comes after the layers' backward passes and is smaller than what they have freed.)
    """
    g, e = geometry_of(hf_config), element_bytes(config)
    wide = g.intermediate // layout.tp_size
    if g.num_experts:
        sp = layout.tp_size if layout.sequence_parallel else 1
        wide = g.expert_intermediate * g.experts_per_token // sp
    # Sequence parallelism gathers whole hidden states before a product.
    elements = (3 if fused else 4) * wide + 2 * g.hidden
    if layout.cp_size > 1:  # a neighbour's keys and values, and gradients of both
        elements += 4 * g.kv_heads * g.head_dim // layout.tp_size
    activations = tokens_per_rank(config, layout) * e * elements
    return activations + e * g.hidden * 2 * wide * (config.adapter.kind == "none")


def tokens_per_rank(config: Config, layout: Layout) -> int:
    """Tokens of a full micro-batch on one context parallel rank."""
    return config.batch.max_tokens_per_microbatch // layout.cp_size


def _norm(width: int, num_norms: int, of_norm: int) -> int:
    """Bytes kept by RMS norms over `width` elements in total, `of_norm` of each and one number."""
    return of_norm * width + 4 * num_norms


def _norm_element_bytes(config: Config, fused: bool) -> int:
    """Bytes of an element that an RMS norm keeps.

    Torch's norm keeps its input and the normed one in float32, the latter for the gradient of its
    weight. Transformer Engine's keeps its input, which the caller counts.
    """
    return 0 if fused else 8 if config.adapter.kind == "none" else 4


def _factors(config: Config, g: Geometry) -> dict[str, int]:
    """Bytes per token kept by the factors beside each layer: A's output, the input of B's product.

    The input of a bound layer is kept for A as it is for a trained weight; that of a layer that is
    not bound is counted too, though a frozen weight does not need it.
    """
    adapter = config.adapter
    targets = adapter.targets if adapter.kind != "none" else ()
    one = element_bytes(config) * adapter.rank
    numbers = {"qkv": 1, "proj": 1, "fc1": 1, "fc2": 1, "experts": 2 * g.experts_per_token}
    return {target: one * number * (target in targets) for target, number in numbers.items()}


def _experts(g: Geometry, e: int, fused: bool) -> int:
    """Bytes per token kept by router and experts, before sequence parallelism."""
    chosen = g.experts_per_token
    # Per chosen expert: id, weight, position. Per expert: probability and choice.
    router = chosen * (2 * _INDEX + 4) + 5 * g.num_experts
    wide = g.expert_intermediate * (4 if fused else 6)
    states = (
        g.hidden if fused else 2 * g.hidden
    )  # torch's sum of them keeps the experts' outputs too
    return router + chosen * (e * (states + wide) + 4)


def head_bytes(hf_config: Any, config: Config, layout: Layout) -> int:
    """Workspace of `logprob.token_log_probs` in its backward pass, its larger one.

    It holds the gradient of the hidden states, the hidden states of all positions if sequence
    parallelism gathers them, and one block of active rows: its states, two float32 gradients (one
    is summed over ranks while the next is computed), the gradient of a tile of logits, and that
    tile in float32.
    """
    tokens, h = tokens_per_rank(config, layout), hf_config.hidden_size
    e = element_bytes(config)
    sp = layout.tp_size if layout.sequence_parallel else 1
    vocab = -(-hf_config.vocab_size // layout.tp_size)
    block_rows, columns = block_shape(vocab)
    rows, columns = min(block_rows, tokens), min(columns, vocab)
    gathered = 2 * tokens * h * e if layout.sequence_parallel else 0  # shards, gathered
    block = rows * (h * (e + 2 * 4) + columns * e)
    tile = 4 * min(block_rows // _TILES_PER_BLOCK, rows) * columns
    return tokens * h * e // sp + gathered + block + tile


def block_shape(num_columns: int) -> tuple[int, int]:
    """What `logprob.tiles.block_shape` gives for this many columns on a GPU (Triton's too)."""
    num_rows = _TILE_LOGITS // max(min(_TILE_COLUMNS, num_columns), 64)
    return max(_TILES_PER_BLOCK * num_rows, _BLOCK_ROWS), _TILE_COLUMNS
