"""Code that architectures share: conversion rules of a decoder, common refusals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models import latent_attention
from gapo_megatron.models.fusions import fused_qkv, gated, same
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.rules import Rule

_MCORE, _HF = "decoder.layers.{layer}", "model.layers.{layer}"

MODEL_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "hidden_act",
    "layer_types",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",  # the same in config.json of transformers 5
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
"""Fields that every architecture has; see `Architecture.model_fields`."""

FULL, WINDOWED = "full_attention", "sliding_attention"
"""Values of config.json's layer_types."""

EXPERTS = {False: "num_experts", True: "n_routed_experts"}
"""Field of config.json with the number of experts, by `Geometry.sigmoid_router`."""
SCORES = {False: "softmax", True: "sigmoid"}
"""What a router makes of its logits, by `Geometry.sigmoid_router`."""
COUNT = ("a whole number of 1 or more", lambda value: type(value) is int and value > 0)


def layer_types(windowed: Iterable[bool]) -> list[str]:
    """The field layer_types of config.json, of whether each layer has the window."""
    return [WINDOWED if has_window else FULL for has_window in windowed]


def periodic_layer_types(period: int, num_layers: int) -> list[str]:
    """The field layer_types if the last layer of each `period` sees all keys."""
    return layer_types(number % period != 0 for number in range(1, num_layers + 1))


def sizes_shown(g: Geometry) -> list[tuple[str, int, str]]:
    """Sizes of config.json that equal the first dimension of a tensor.

    Returns:
        (field for errors, its value, Hugging Face name with `*` for every number).
    """
    layer, attention = "model.layers.*", "model.layers.*.self_attn"
    mlp, head = f"{layer}.mlp", f"head_dim ({g.head_dim})"
    if g.latent:
        head = f"(qk_nope_head_dim ({g.latent.nope}) + qk_rope_head_dim ({g.latent.rope}))"
    heads = f"num_attention_heads ({g.heads}) x {head}"
    kv_heads = f"num_key_value_heads ({g.kv_heads}) x {head}"
    shared = "moe_intermediate_size x n_shared_experts", g.shared_intermediate
    return [
        ("vocab_size", g.vocab, "model.embed_tokens.weight"),
        ("hidden_size", g.hidden, f"{layer}.{next(filter(None, _norms(g)))}.weight"),
        *([("head_dim", g.head_dim, f"{attention}.q_norm.weight")] if g.head_norms else []),
        (heads, g.heads * g.head_dim, f"{attention}.q_proj.weight"),
        (heads, g.heads * g.head_dim, f"{attention}.q_b_proj.weight"),
        (kv_heads, g.kv_heads * g.head_dim, f"{attention}.k_proj.weight"),
        ("intermediate_size", g.intermediate, f"{mlp}.gate_proj.weight"),
        (EXPERTS[g.sigmoid_router], g.num_experts, f"{mlp}.gate.weight"),
        ("num_local_experts", g.num_experts, f"{mlp}.router.weight"),
        ("intermediate_size", g.expert_intermediate, f"{mlp}.experts.*.down_proj"),
        ("moe_intermediate_size", g.expert_intermediate, f"{mlp}.experts.*.gate_proj.weight"),
        (*shared, f"{mlp}.shared_experts.gate_proj.weight"),
    ]


# --- TransformerConfig ---------------------------------------------------------------------------


def transformer_fields(config: Any, g: Geometry) -> dict[str, Any]:
    """TransformerConfig fields of a dense decoder with RMSNorm and a gated SiLU MLP.

    Args:
        config: config.json's fields as attributes.
        g: its geometry.
    """
    import torch.nn.functional as F

    return {
        "num_layers": g.num_layers,
        "hidden_size": g.hidden,
        "ffn_hidden_size": g.intermediate,
        "num_attention_heads": g.heads,
        "num_query_groups": g.kv_heads,
        "kv_channels": g.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": g.linear_biases,
        "add_qkv_bias": g.qkv_bias,
        "qk_layernorm": g.head_norms or g.joint_head_norms,
        # Keys to the left and right of the query's own.
        "window_size": (g.window - 1, 0) if g.window else None,
        "window_attn_skip_freq": [int(is_windowed) for is_windowed in g.windowed] or None,
    }


# --- refusals ------------------------------------------------------------------------------------


def refuse_set(config: Any, *fields: str) -> None:
    """Raise ConfigError if one of these fields is set (not null, false, zero or empty)."""
    for field in fields:
        if value := getattr(config, field, None):
            raise ConfigError(
                f"config.json: {field} ({value}) is not supported for {config.model_type} models"
            )


def check_computed(config: Any, *, windows: bool = False, biases: tuple[str, ...] = ()) -> None:
    """Refuse what `transformer_fields` cannot express: biases, windows, other activations.

    Args:
        config: config.json's fields as attributes.
        windows: whether the architecture's geometry has them.
        biases: fields of biases that it has.

    Raises:
        ConfigError: names the field and its value.
    """
    for field in ("attention_bias", "mlp_bias"):
        if field not in biases and getattr(config, field, False):
            raise ConfigError(f"the model's {field} (true) is not supported")
    window = getattr(config, "sliding_window", None)
    if window and not windows and getattr(config, "use_sliding_window", True):
        raise ConfigError(f"the model's sliding_window ({window}) is not supported: must be null")
    if config.hidden_act != "silu":
        raise ConfigError(f"the model's hidden_act ({config.hidden_act!r}) must be 'silu'")


# --- conversion rules: the parts of a model ------------------------------------------------------


def _norms(g: Geometry) -> tuple[str, str, str, str]:
    """Hugging Face names of the norms before and behind attention, before and behind the MLP."""
    before = "input_layernorm" if g.input_norms else ""
    if not g.output_norms:
        return before, "", "post_attention_layernorm", ""
    middle = "pre_feedforward_layernorm" if g.input_norms else ""
    return before, "post_attention_layernorm", middle, "post_feedforward_layernorm"


def _norm(g: Geometry, name: str, megatron: str, te_name: str | None = None) -> list[Rule]:
    """The rule of a layer's norm; none without a name."""
    if not name:
        return []
    names = f"{_MCORE}.{megatron}.weight", f"{_HF}.{name}.weight"
    return [same(*names, (g.hidden,), num_layers=g.num_layers, te_name=te_name)]


def decoder(g: Geometry) -> list[Rule]:
    """All parameters of a decoder, dense or with experts, in the order of the model."""
    if not g.num_dense:
        layers = experts(g) if g.num_experts else mlp(g)
        return [embedding(g), *attention(g), *layers, *output(g)]
    first, others = range(g.num_dense), range(g.num_dense, g.num_layers)
    return [
        embedding(g),
        *_only_in(range(g.num_layers), attention(g)),
        *_only_in(first, mlp(g)),
        *_only_in(others, experts(g)),
        *output(g),
    ]


def _only_in(layers: range, rules: list[Rule]) -> list[Rule]:
    """The rules for some layers of a model whose layers differ."""
    return [replace(rule, in_layers=layers) for rule in rules]


def embedding(g: Geometry) -> Rule:
    """Token embedding."""
    return same(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        (g.vocab, g.hidden),
        tp_dim=0,
        vocab_padded=True,
    )


def attention(g: Geometry) -> list[Rule]:
    """Query, key, value (with optional biases and norms), output projection; norms around them."""
    mcore, hf, layers = f"{_MCORE}.self_attention", f"{_HF}.self_attn", g.num_layers
    before, behind, *_ = _norms(g)
    if g.latent:
        return [*_norm(g, before, "input_layernorm"), *latent_attention.rules(g)]
    q, k, v = (f"{hf}.{name}_proj" for name in "qkv")
    # fmt: off
    rules = [
        *_norm(g, before, "input_layernorm", f"{mcore}.linear_qkv.layer_norm_weight"),
        fused_qkv(f"{mcore}.linear_qkv.weight", (f"{q}.weight", f"{k}.weight", f"{v}.weight"), g),
    ]
    if g.qkv_bias:
        names = (f"{q}.bias", f"{k}.bias", f"{v}.bias")
        rules.append(fused_qkv(f"{mcore}.linear_qkv.bias", names, g))
    if g.head_norms:
        rules += [
            same(f"{mcore}.{x}_layernorm.weight", f"{hf}.{x}_norm.weight", (g.head_dim,),
                 num_layers=layers)
            for x in "qk"
        ]
    if g.joint_head_norms:
        rules += [
            same(f"{mcore}.{x}_layernorm.weight", f"{hf}.{x}_norm.weight", (heads * g.head_dim,),
                 num_layers=layers)
            for x, heads in (("q", g.heads), ("k", g.kv_heads))
        ]
    if g.sinks:
        rules.append(same(f"{mcore}.core_attention.softmax_offset", f"{hf}.sinks", (g.heads,),
                          tp_dim=0, num_layers=layers))
    rules.append(same(f"{mcore}.linear_proj.weight", f"{hf}.o_proj.weight",
                      (g.hidden, g.heads * g.head_dim), tp_dim=1, num_layers=layers))
    if g.linear_biases:
        rules.append(same(f"{mcore}.linear_proj.bias", f"{hf}.o_proj.bias", (g.hidden,),
                          num_layers=layers))
    return [
        *rules,
        *_norm(g, behind, "self_attn_bda.norm"),
    ]
    # fmt: on


def mlp(g: Geometry) -> list[Rule]:
    """Gate and up projection, down projection; norms around them."""
    *_, before, behind = _norms(g)
    return [
        *_norm(g, before, "pre_mlp_layernorm", f"{_MCORE}.mlp.linear_fc1.layer_norm_weight"),
        *_projections(g, "mlp", g.intermediate),
        *_norm(g, behind, "mlp_bda.norm"),
    ]


def _projections(g: Geometry, module: str, width: int) -> list[Rule]:
    """Gate and up projection, down projection of an MLP that tensor parallelism cuts."""
    mcore, hf, layers = f"{_MCORE}.{module}", f"{_HF}.{module}", g.num_layers
    # fmt: off
    return [
        gated(f"{mcore}.linear_fc1.weight",
              (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), (width, g.hidden),
              num_layers=layers),
        same(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight",
             (g.hidden, width), tp_dim=1, num_layers=layers),
    ]
    # fmt: on


def experts(g: Geometry) -> list[Rule]:
    """Norm, router, every expert's gate, up and down projection, and those that tokens share."""
    mcore, hf = f"{_MCORE}.mlp.experts", f"{_HF}.mlp.experts.{{expert}}"
    local = f"{mcore}.local_experts.{{expert}}"
    size, number = g.expert_intermediate, g.num_experts
    repeats = {"num_layers": g.num_layers, "num_experts": number}
    bias = same(
        f"{_MCORE}.mlp.router.expert_bias",
        f"{_HF}.mlp.gate.e_score_correction_bias",
        (number,),
        num_layers=g.num_layers,
        is_buffer=True,
    )
    shared = _projections(g, "mlp.shared_experts", g.shared_intermediate)
    # fmt: off
    return [
        same(f"{_MCORE}.pre_mlp_layernorm.weight", f"{_HF}.post_attention_layernorm.weight",
             (g.hidden,), num_layers=g.num_layers),
        same(f"{_MCORE}.mlp.router.weight", f"{_HF}.mlp.gate.weight", (number, g.hidden),
             num_layers=g.num_layers),
        *([bias] if g.sigmoid_router else []),
        gated(f"{local}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"),
              (size, g.hidden), te_name=f"{mcore}.linear_fc1.weight{{expert}}", **repeats),
        same(f"{local}.linear_fc2.weight", f"{hf}.down_proj.weight", (g.hidden, size),
             tp_dim=1, te_name=f"{mcore}.linear_fc2.weight{{expert}}", **repeats),
        *(shared if g.shared_intermediate else []),
    ]
    # fmt: on


def output(g: Geometry) -> list[Rule]:
    """Final norm, and the output layer, which may be tied to the embedding."""
    hf = "model.embed_tokens.weight" if g.tied else "lm_head.weight"
    shape = (g.vocab, g.hidden)
    return [
        same("decoder.final_layernorm.weight", "model.norm.weight", (g.hidden,)),
        same("output_layer.weight", hf, shape, tp_dim=0, vocab_padded=True, tied=g.tied),
    ]
