"""Bytes of activations that the layers keep for their backward pass.

The formulas follow the tensors that each module saves. For layers without Transformer Engine
they are checked on a CPU against torch's saved-tensor hooks; for Transformer Engine's they follow
from its sources and have not been measured.

Assumptions: no dropout; attention never stores a matrix of scores (flash attention); micro-batches
need no padding; experts get equal shares of the tokens.

Sizes on one rank: q query width, k key (or value) width, n query heads, all divided by tensor
parallelism; e bytes per element. Sequence parallelism divides hidden states, context parallelism
divides everything: a rank holds its part of the tokens and, in Transformer Engine's ring of keys
and values, at most one neighbour's in addition.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Self

from gapo_megatron.config import Config
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.tables import architecture_of, geometry_of, rope_of
from gapo_tools.planner.flops import element_bytes
from gapo_tools.planner.layout import Layout

_INDEX = 8  # int64
_TILE_COLUMNS, _TILE_LOGITS = 8192, 2**24
_TILES_PER_BLOCK, _BLOCK_ROWS = 8, 4096
"""Tile and block sizes of the head on a GPU: a copy of those in `logprob.tiles.block_shape`, which
imports torch."""
_SINK_ELEMENTS = 8
"""Elements that a head grows by for a sink: a copy of `policy.sinks`, which imports torch."""


class Kernels(Enum):
    """What computes the layers."""

    TRANSFORMER_ENGINE = auto()
    FLASH = auto()
    """Our layers; attention is one kernel, which reads packed sequences as they are."""
    PADDED = auto()
    """Our layers; attention pads the sequences, and has masks."""

    @classmethod
    def of(cls, hf_config: Any, config: Config, layout: Layout) -> Self:
        """Those of a run on GPUs with Transformer Engine, which fp32 runs do not use."""
        if config.model.precision == "fp32":
            return cls.PADDED
        if architecture_of(hf_config).megatron_layers:
            return cls.TRANSFORMER_ENGINE
        return cls.PADDED if layout.cp_size > 1 else cls.FLASH


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
    def of(
        cls,
        hf_config: Any,
        config: Config,
        layout: Layout,
        *,
        kernels: Kernels,
        has_experts: bool | None = None,
    ) -> Self:
        """Bytes per token of one layer on one rank of a layout.

        Args:
            hf_config: the model's config.
            config: the run's settings.
            layout: how the run is divided.
            kernels: what computes the layers.
            has_experts: whether it is a layer with experts; None: it is the last layer.
        """
        g, tp = geometry_of(hf_config), layout.tp_size
        has_experts = g.has_experts[-1] if has_experts is None else has_experts
        fused = kernels is Kernels.TRANSFORMER_ENGINE
        sp = tp if layout.sequence_parallel else 1
        e, of_norm = element_bytes(config), _norm_element_bytes(config, fused)
        hidden = e * g.hidden // sp
        q, k, n = (size // tp for size in (g.heads * g.head_dim, g.kv_heads * g.head_dim, g.heads))
        mixed, rotated, out, log_sums = e * (q + 2 * k), e * (q + k), e * q, 4 * n
        # Attention. Its output is also the projection's input; norms keep queries and keys.
        attention = mixed + rotated + out + log_sums
        recomputed = mixed + out + (e * q if g.heads > g.kv_heads else 0)  # grouped: copies
        if g.latent:
            attention, recomputed = _latent_attention(g, layout, e, of_norm, fused)
        elif g.head_norms or g.joint_head_norms:
            counts = (n, k // g.head_dim) if g.head_norms else (1, 1)
            kept = sum(_norm(w, c, of_norm) for w, c in zip((q, k), counts, strict=True))
            attention += kept + (e * (q + k) if fused else 0)
            recomputed = mixed + rotated + out + kept
        if g.sinks and kernels is Kernels.PADDED:
            # Grown copies of queries, keys and values, and the output before it is cut.
            grown = e * (2 * q + 2 * k) * (g.head_dim + _SINK_ELEMENTS) // g.head_dim
            attention = grown + out + log_sums
        if layout.cp_size > 1 and not fused:
            # All keys and values, the mask, and the output before and after it is rearranged; the
            # same again if attention is recomputed.
            longest = config.max_sequence_tokens
            gathered = e * layout.cp_size * 2 * k
            attention += gathered + e * longest + e * q - mixed

        # Norms and MLP or experts, and what selective recomputation repeats.
        norms = 2 * (_norm(g.hidden, 1, of_norm) // sp + hidden)
        norms += 2 * hidden if fused else 0
        if g.input_norms and g.output_norms:
            norms += 2 * _norm(g.hidden, 1, of_norm) // sp
        # Transformer Engine's layers recompute the norm before the MLP and, in a dense layer, the
        # whole MLP; with experts only their activation, the input of their second product. Ours
        # recompute the MLP alone.
        again = hidden + _norm(g.hidden, 1, of_norm) // sp if fused else 0
        per_width = e * (3 if fused else 5)
        if has_experts:
            mlp = _experts(g, e, fused) // sp + per_width * (g.shared_intermediate // tp)
            again += e * g.experts_per_token * g.expert_intermediate // sp
        else:
            mlp = per_width * (g.intermediate // tp)
            again += mlp
        factors = _factors(config, g)
        attention += factors["qkv"] + factors["proj"] + factors["latent"] // sp
        if has_experts:
            mlp += factors["experts"] // sp
        if g.shared_intermediate or not has_experts:
            mlp += factors["fc1"] + factors["fc2"]
        # What is recomputed is one setting for all layers.
        if kernels is Kernels.PADDED or (g.num_experts and not fused):
            return cls(hidden, norms, attention, mlp, norms + recomputed + mlp, 0)
        return cls(hidden, norms, attention, mlp, norms + attention + mlp - again, again)


def _latent_attention(
    g: Geometry, layout: Layout, e: int, of_norm: int, fused: bool
) -> tuple[int, int]:
    """Bytes per token kept by latent attention, and those if its core is recomputed."""
    assert g.latent is not None
    tp, sp = layout.tp_size, layout.tp_size if layout.sequence_parallel else 1
    q, v, n = (size // tp for size in (g.heads * g.head_dim, g.heads * g.latent.value, g.heads))
    up = n * (g.latent.nope + g.latent.value)
    # Latent vectors, and their norms: the inputs of the projections out of them.
    latents = [size for size in (g.latent.query, g.latent.key_value) if size]
    kept = sum(_norm(size, 1, of_norm) + e * size * (1 + fused) for size in latents) // sp
    if fused:
        return kept + e * (2 * q + 2 * v) + 4 * n, kept + e * (2 * q + 2 * v)
    # Queries, keys, values as large as those, the output as large; the projection's input.
    return kept + e * (4 * q + v) + 4 * n, kept + e * (2 * q + up + v)


@dataclass(frozen=True, slots=True)
class KeptActivations:
    """Peak bytes that autograd keeps on one rank during a step."""

    layers: int
    """Activations of the layers, for the micro-batches in flight (`num_in_flight`)."""
    recomputed: int
    """Recomputed activations of one layer during its backward pass."""
    head: int
    """Activations of final norm and log-probs; freed before the layers' backward passes."""
    neighbours: int
    """What the pipeline schedule holds for other stages, beside `most`: inputs and outputs in
    flight, at most."""

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
    kernels: Kernels,
) -> KeptActivations:
    """Predict what is kept for micro-batches of `batch.max_tokens_per_microbatch` tokens.

    Args:
        hf_config: the model's config.
        config: the run's settings.
        layout: how the run is divided.
        stage: pipeline rank.
        num_microbatches: micro-batches of an update.
        kernels: what computes the layers.
    """
    fused = kernels is Kernels.TRANSFORMER_ENGINE
    layers_here = layers_of_stages(layout.parallel, hf_config.num_hidden_layers)[stage]
    has_experts = geometry_of(hf_config).has_experts
    kinds = Counter(has_experts[number] for part in layers_here for number in part)
    layers = {
        kind: LayerBytes.of(hf_config, config, layout, kernels=kernels, has_experts=kind)
        for kind in kinds
    }
    layer = next(iter(layers.values()))  # what follows is alike in all
    tokens = tokens_per_rank(config, layout)
    in_flight = num_in_flight(layout, stage=stage, num_microbatches=num_microbatches)
    sp = layout.tp_size if layout.sequence_parallel else 1
    e, head = element_bytes(config), 0
    # Virtual stages count as alike.
    kept = sum(kinds[kind] * one.kept(layout.recompute) for kind, one in layers.items())
    kept = -(-kept // layout.vpp_size)
    if stage == 0:
        kept += _INDEX  # tokens (strictly: of the first virtual stage only)
    masks = 0
    if not fused:  # rotary tables
        g, rope = geometry_of(hf_config), rope_of(hf_config.to_dict())
        of_table = max(e, 4) if architecture_of(hf_config).rotates_in_float32 else e
        kept += 2 * of_table * rope.rotated(g.rotary_dim) * (1 if rope.windowed_base is None else 2)
        longest = min(config.max_sequence_tokens, config.batch.max_tokens_per_microbatch)
        if kernels is Kernels.PADDED and 0 < g.window < longest:
            # Of windowed layers, for every sequence of a context parallel rank; otherwise one for
            # all sequences of similar length (shorter ones add at most a third).
            masks = tokens * longest if layout.cp_size > 1 else longest**2
    if stage == layout.pp_size - 1:  # final norm, the head's input; label, row, two statistics
        of_norm = _norm_element_bytes(config, fused)
        head = _norm(hf_config.hidden_size, 1, of_norm) // sp + layer.hidden * (1 + fused)
        head += 2 * _INDEX + 8
    recomputed = 0
    if layout.recompute == "full":
        # The layer's input is kept anyway; norms in float32 keep their own copy of it.
        most = max(one.all for one in layers.values())
        recomputed = most - layer.hidden * (fused or e == 4)
    elif layout.recompute == "selective":
        recomputed = max(one.selective_again for one in layers.values())
    # Under full recomputation a stage's input is its first layer's.
    inputs = in_flight * (layout.recompute != "full")
    held = layer.hidden * (inputs + in_flight + 1) if layout.pp_size > 1 else 0
    return KeptActivations(
        layers=(tokens * kept + masks) * in_flight,
        recomputed=tokens * recomputed,
        head=tokens * head,
        neighbours=tokens * held,
    )


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


def working_bytes(hf_config: Any, config: Config, layout: Layout, *, kernels: Kernels) -> int:
    """Workspace of one layer's backward pass in addition to kept activations: an estimate.

    Gradients of the MLP's two widest tensors and of two hidden states, and the largest weight's
    gradient before it is added to its float32 buffer (a frozen weight has none). (The embedding's
    gradient comes after the layers' backward passes and is smaller than what they have freed.)
    """
    g, e = geometry_of(hf_config), element_bytes(config)
    sp = layout.tp_size if layout.sequence_parallel else 1
    routed = g.expert_intermediate * g.experts_per_token // sp
    wide = max(g.shared_intermediate // layout.tp_size, routed)
    if not all(g.has_experts):
        wide = max(wide, g.intermediate // layout.tp_size)
    # Sequence parallelism gathers whole hidden states before a product.
    elements = (3 if kernels is Kernels.TRANSFORMER_ENGINE else 4) * wide + 2 * g.hidden
    if layout.cp_size > 1:  # a neighbour's keys and values, and gradients of both
        elements += 4 * g.kv_heads * g.head_dim // layout.tp_size
    activations = tokens_per_rank(config, layout) * e * elements
    return activations + e * g.hidden * 2 * wide * (config.adapter.kind == "none")


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
    of_qkv, downs = (2, 1 + bool(g.latent.query)) if g.latent else (1, 0)
    numbers = {"qkv": of_qkv, "proj": 1, "latent": downs, "fc1": 1, "fc2": 1}
    numbers["experts"] = 2 * g.experts_per_token
    return {target: one * number * (target in targets) for target, number in numbers.items()}


def _experts(g: Geometry, e: int, fused: bool) -> int:
    """Bytes per token kept by router and experts, before sequence parallelism."""
    chosen = g.experts_per_token
    # Per chosen expert: id, weight, position. Per expert: probability and choice.
    router = chosen * (2 * _INDEX + 4) + 5 * g.num_experts
    # Without a fused kernel a limit keeps both clamped halves too.
    wide = g.expert_intermediate * (4 if fused else 8 if g.gate_limit else 6)
    states = g.hidden * (1 if fused else 2)  # torch's sum keeps the experts' outputs too
    return router + chosen * (e * (states + wide) + 4)
