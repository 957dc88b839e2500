"""Bytes of activations: what the layers keep for their backward pass.

Written down from the tensors that each module saves; checked on a CPU against torch's saved-tensor
hooks for the layers without Transformer Engine ("local"). Those of Transformer Engine ("fused")
follow from its modules' sources and have not been measured.

Assumptions: no dropout; attention never keeps a matrix of scores (flash attention); sequences of a
micro-batch need no padding; experts get equal shares of the tokens.

Sizes of one rank: h hidden, q query width, k key (or value) width, n query heads, f MLP width
(an expert's: g), all but h and g divided by tensor parallelism; e bytes of an element; p of the
tokens choose an expert each. Hidden states are divided under sequence parallelism, and everything
under context parallelism: a rank has its part of the tokens, and under Transformer Engine's ring of
keys and values at most a neighbour's besides.
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


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that one layer keeps for one token, by the module that keeps them."""

    hidden: int
    """One hidden state: the layer's input; full recomputation keeps nothing else."""
    norms: int
    attention: int
    """All that the core attention keeps, its inputs and output included."""
    mlp: int
    selective: int
    """Bytes kept in all if some modules are recomputed: `policy.model` says which."""
    selective_again: int
    """Bytes of the recomputed modules during one layer's backward pass; core attention left out."""

    @property
    def all(self) -> int:
        return self.norms + self.attention + self.mlp

    def kept(self, recompute: str) -> int:
        """Bytes a token between forward and backward pass."""
        if recompute == "full":
            return self.hidden
        if recompute == "selective":
            return self.selective
        return self.all

    @classmethod
    def of(cls, hf_config: Any, config: Config, layout: Layout, *, fused: bool) -> Self:
        """Bytes of a model's layer on one rank of a layout."""
        g, tp = geometry_of(hf_config), layout.tp_size
        sp = tp if layout.sequence_parallel else 1
        e = element_bytes(config)
        hidden = e * g.hidden // sp
        q, k, n = (size // tp for size in (g.heads * g.head_dim, g.kv_heads * g.head_dim, g.heads))
        mixed, rotated, out, log_sums = e * (q + 2 * k), e * (q + k), e * q, 4 * n
        # The output is the projection's input too, and queries and keys enter the norms' memory.
        attention = mixed + rotated + out + log_sums
        recomputed = mixed + out + (e * q if g.heads > g.kv_heads else 0)  # several heads: a copy
        if g.head_norms:
            attention += _norm(q, n, fused) + _norm(k, k // g.head_dim, fused)
            attention += e * (q + k) if fused else 0
            recomputed = mixed + rotated + out
            recomputed += _norm(q, n, fused) + _norm(k, k // g.head_dim, fused)
        if layout.cp_size > 1 and not fused:
            # All keys and values, a mask of the queries against them, the output as it was attended
            # and as it is projected; all of it once more where it is recomputed.
            longest = config.max_sequence_tokens
            gathered = e * layout.cp_size * 2 * k
            attention += gathered + e * longest + e * q - mixed
        norms = 2 * (_norm(g.hidden, 1, fused) // sp + hidden)
        norms += 2 * hidden if fused else 0
        # Transformer Engine's layers recompute the norm before the MLP and of a dense layer all of
        # the MLP, with experts their activation alone, the input of their second product.
        again = hidden + _norm(g.hidden, 1, fused) // sp
        if g.num_experts:
            mlp = _experts(g, e, fused) // sp
            again += e * g.experts_per_token * g.expert_intermediate // sp
        else:
            mlp = e * (g.intermediate // tp) * (3 if fused else 5)
            again += mlp
        if not fused:
            return cls(hidden, norms, attention, mlp, norms + recomputed + mlp, 0)
        return cls(hidden, norms, attention, mlp, norms + attention + mlp - again, again)


@dataclass(frozen=True, slots=True)
class KeptActivations:
    """Bytes that autograd keeps on one rank at the worst moment of a step."""

    layers: int
    """Layers' activations of the micro-batches in flight: see `num_in_flight`."""
    recomputed: int
    """Activations of one layer during its backward pass, under recomputation."""
    head: int
    """Activations of the final norm and the log-probs: freed before the layers' backward passes."""

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
    """Predict what is kept of micro-batches of `batch.max_tokens_per_microbatch` tokens.

    Args:
        hf_config: the model's config.
        config: the run's settings.
        layout: how it is cut.
        stage: pipeline rank.
        num_microbatches: micro-batches of an update.
        fused: Transformer Engine's layers.
    """
    layer = LayerBytes.of(hf_config, config, layout, fused=fused)
    num_layers = layout.layers_of_ranks(hf_config.num_hidden_layers)[stage] // layout.vpp_size
    tokens = tokens_per_rank(config, layout)
    in_flight = num_in_flight(layout, stage=stage, num_microbatches=num_microbatches)
    sp = layout.tp_size if layout.sequence_parallel else 1
    e, kept, head = element_bytes(config), num_layers * layer.kept(layout.recompute), 0
    if stage == 0:
        kept += _INDEX  # tokens: in truth of the first virtual stage alone
    if not fused:  # rotary tables
        kept += 2 * e * geometry_of(hf_config).head_dim
    if stage == layout.pp_size - 1:  # final norm, the head's input; label, row, two statistics
        head = _norm(hf_config.hidden_size, 1, fused) // sp + layer.hidden * (1 + fused)
        head += 2 * _INDEX + 8
    recomputed = 0
    if layout.recompute == "full":
        # The layer's input is there in any case; norms in float32 keep their own copy of it.
        recomputed = layer.all - layer.hidden * (fused or e == 4)
    elif layout.recompute == "selective":
        recomputed = layer.selective_again
    return KeptActivations(tokens * in_flight * kept, tokens * recomputed, tokens * head)


def num_in_flight(layout: Layout, *, stage: int, num_microbatches: int) -> int:
    """Micro-batches whose activations a rank holds at once; of its virtual stages, all together.

        in flight = p - r                             one stage on rank r of p
                  = 2 (p - r - 1) + (v - 1) p + 1     v virtual stages, each with 1/v of the layers

    Those of the warm-up (Megatron-core's `get_pp_rank_microbatches`), and the one that goes forward
    before the first goes back; and never more than all v m of an update.
    """
    later = layout.pp_size - stage - 1
    most = later + 1
    if layout.vpp_size > 1:
        most += later + (layout.vpp_size - 1) * layout.pp_size
    return min(most, layout.vpp_size * num_microbatches)


def neighbour_bytes(
    hf_config: Any, config: Config, layout: Layout, *, stage: int, num_microbatches: int
) -> int:
    """Bytes of what the schedule holds for pipeline neighbours: inputs and outputs in flight.

    The model's first stage has no input: of a first rank with virtual stages that is 2 p - 1 of
    those in flight. Its last has no output: a last rank with virtual stages has at times none in
    flight there. With virtual stages the next input is received before a rank goes back. Under full
    recomputation the first layer of a stage keeps its input, which is counted with the layers.
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
    """Bytes that one layer's backward pass has at once besides what is kept: an estimate.

    Gradients of the MLP's two widest tensors and of two hidden states; and the largest weight's
    gradient before it is added to its float32 buffer. (The embedding's comes when the layers have
    gone back, and is less than they kept.)
    """
    g, e = geometry_of(hf_config), element_bytes(config)
    wide = g.intermediate // layout.tp_size
    if g.num_experts:
        sp = layout.tp_size if layout.sequence_parallel else 1
        wide = g.expert_intermediate * g.experts_per_token // sp
    # Sequence parallelism gathers whole hidden states before a product.
    elements = (3 if fused else 4) * wide + 2 * g.hidden
    if layout.cp_size > 1:  # keys and values of a neighbour, and the gradients of both on their way
        elements += 4 * g.kv_heads * g.head_dim // layout.tp_size
    activations = tokens_per_rank(config, layout) * e * elements
    return activations + e * g.hidden * 2 * wide


def tokens_per_rank(config: Config, layout: Layout) -> int:
    """Tokens of a full micro-batch on one of the ranks that share its sequences."""
    return config.batch.max_tokens_per_microbatch // layout.cp_size


def _norm(width: int, num_norms: int, fused: bool) -> int:
    """Kept by RMS norms over `width` elements in all: torch's keeps two float32 copies.

    Transformer Engine's keeps its input, counted by the caller, and one number.
    """
    return 4 * num_norms if fused else 8 * width + 4 * num_norms


def _experts(g: Geometry, e: int, fused: bool) -> int:
    """Kept of one token by router and experts, before sequence parallelism divides the tokens."""
    chosen = g.experts_per_token
    # Expert, share, place in the order of experts; of all experts share and choice.
    router = chosen * (2 * _INDEX + 4) + 5 * g.num_experts
    wide = g.expert_intermediate * (4 if fused else 6)
    states = (
        g.hidden if fused else 2 * g.hidden
    )  # torch's sum of them keeps the experts' outputs too
    return router + chosen * (e * (states + wide) + 4)
