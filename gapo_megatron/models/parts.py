"""Code that architectures share: sizes, conversion rules of a decoder, common refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models.rules import Rule, Shape, concatenate

if TYPE_CHECKING:
    from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and features of a decoder that determine tensor shapes and costs."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Size of one attention head; not always hidden / heads."""
    intermediate: int
    """Width of a dense layer's MLP."""
    vocab: int
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
    """Whether query, key and value projections have biases."""
    head_norms: bool = False
    """Whether every query and key head is normalised."""
    num_experts: int = 0
    """Experts in every layer; 0: a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    """Width of one expert's MLP."""

    @classmethod
    def of(cls, config: Any, **features: Any) -> Geometry:
        """Read the common sizes from config.json (any object with its attributes).

        Args:
            config: the model's config.
            features: the other fields of `Geometry`.
        """
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            **features,
        )


def sizes_shown(g: Geometry) -> list[tuple[str, int, str]]:
    """Sizes of config.json that equal the first dimension of a tensor.

    Returns:
        (field for errors, its value, Hugging Face name with `*` for every number).
    """
    layer, attention = "model.layers.*", "model.layers.*.self_attn"
    heads = f"num_attention_heads ({g.heads}) x head_dim ({g.head_dim})"
    kv_heads = f"num_key_value_heads ({g.kv_heads}) x head_dim ({g.head_dim})"
    return [
        ("vocab_size", g.vocab, "model.embed_tokens.weight"),
        ("hidden_size", g.hidden, f"{layer}.input_layernorm.weight"),
        ("head_dim", g.head_dim, f"{attention}.q_norm.weight"),
        (heads, g.heads * g.head_dim, f"{attention}.q_proj.weight"),
        (kv_heads, g.kv_heads * g.head_dim, f"{attention}.k_proj.weight"),
        ("intermediate_size", g.intermediate, f"{layer}.mlp.gate_proj.weight"),
        ("num_experts", g.num_experts, f"{layer}.mlp.gate.weight"),
        (
            "moe_intermediate_size",
            g.expert_intermediate,
            f"{layer}.mlp.experts.*.gate_proj.weight",
        ),
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
        "add_bias_linear": False,
        "add_qkv_bias": g.qkv_bias,
        "qk_layernorm": g.head_norms,
    }


# --- refusals ------------------------------------------------------------------------------------


def refuse_set(config: Any, *fields: str) -> None:
    """Raise ConfigError if one of these fields is set (not null, false, zero or empty)."""
    for field in fields:
        if value := getattr(config, field, None):
            raise ConfigError(
                f"config.json: {field} ({value}) is not supported for {config.model_type} models"
            )


def check_computed(config: Any) -> None:
    """Refuse what `transformer_fields` cannot express: biases, windows, other activations.

    Raises:
        ConfigError: names the field and its value.
    """
    for field in ("attention_bias", "mlp_bias"):
        if getattr(config, field, False):
            raise ConfigError(f"the model's {field} (true) is not supported")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise ConfigError(f"the model's sliding_window ({window}) is not supported: must be null")
    if config.hidden_act != "silu":
        raise ConfigError(f"the model's hidden_act ({config.hidden_act!r}) must be 'silu'")


# --- conversion rules: the parts of a model ------------------------------------------------------


def decoder(g: Geometry) -> list[Rule]:
    """All parameters of a decoder, dense or with experts, in the order of the model."""
    layers = experts(g) if g.num_experts else mlp(g)
    return [embedding(g), *attention(g), *layers, *output(g)]


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
    """Input norm, query, key, value (with optional biases and head norms), output projection."""
    mcore, hf, layers = f"{_MCORE}.self_attention", f"{_HF}.self_attn", g.num_layers
    q, k, v = (f"{hf}.{name}_proj" for name in "qkv")
    # fmt: off
    rules = [
        same(f"{_MCORE}.input_layernorm.weight", f"{_HF}.input_layernorm.weight", (g.hidden,),
             num_layers=layers, te_name=f"{mcore}.linear_qkv.layer_norm_weight"),
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
    return [
        *rules,
        same(f"{mcore}.linear_proj.weight", f"{hf}.o_proj.weight",
             (g.hidden, g.heads * g.head_dim), tp_dim=1, num_layers=layers),
    ]
    # fmt: on


def mlp(g: Geometry) -> list[Rule]:
    """Norm, gate and up projection, down projection."""
    mcore, hf, layers = f"{_MCORE}.mlp", f"{_HF}.mlp", g.num_layers
    # fmt: off
    return [
        same(f"{_MCORE}.pre_mlp_layernorm.weight", f"{_HF}.post_attention_layernorm.weight",
             (g.hidden,), num_layers=layers, te_name=f"{mcore}.linear_fc1.layer_norm_weight"),
        gated(f"{mcore}.linear_fc1.weight",
              (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), (g.intermediate, g.hidden),
              num_layers=layers),
        same(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight",
             (g.hidden, g.intermediate), tp_dim=1, num_layers=layers),
    ]
    # fmt: on


def experts(g: Geometry) -> list[Rule]:
    """Norm, router, and every expert's gate, up and down projection."""
    mcore, hf = f"{_MCORE}.mlp.experts", f"{_HF}.mlp.experts.{{expert}}"
    local = f"{mcore}.local_experts.{{expert}}"
    size, number = g.expert_intermediate, g.num_experts
    repeats = {"num_layers": g.num_layers, "num_experts": number}
    # fmt: off
    return [
        same(f"{_MCORE}.pre_mlp_layernorm.weight", f"{_HF}.post_attention_layernorm.weight",
             (g.hidden,), num_layers=g.num_layers),
        same(f"{_MCORE}.mlp.router.weight", f"{_HF}.mlp.gate.weight", (number, g.hidden),
             num_layers=g.num_layers),
        gated(f"{local}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"),
              (size, g.hidden), te_name=f"{mcore}.linear_fc1.weight{{expert}}", **repeats),
        same(f"{local}.linear_fc2.weight", f"{hf}.down_proj.weight", (g.hidden, size),
             tp_dim=1, te_name=f"{mcore}.linear_fc2.weight{{expert}}", **repeats),
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


# --- conversion rules: the ways a parameter is made ----------------------------------------------


def same(megatron: str, hf: str, shape: Shape, *, tp_dim: int | None = None, **flags: Any) -> Rule:
    """The same tensor under two names."""
    return Rule(
        megatron, (hf,), (shape,), tp_dim, join=lambda t: t[0], part=lambda full: (full,), **flags
    )


def fused_qkv(megatron: str, hf: tuple[str, str, str], geometry: Geometry) -> Rule:
    """Query, key, value -> linear_qkv, interleaved by key/value group.

    Megatron stores, for each key/value head, its query heads, then the key head, then the value
    head; tensor parallelism cuts between these groups. Weights are [heads * head_dim, hidden],
    biases [heads * head_dim].
    """
    groups, head_dim = geometry.kv_heads, geometry.head_dim
    if geometry.heads % groups:
        raise ConfigError(
            f"config.json: num_key_value_heads ({groups}) must divide "
            f"num_attention_heads ({geometry.heads})"
        )
    rest = () if hf[0].endswith(".bias") else (geometry.hidden,)
    # `join` and `part` do not ask for the columns: an adapter's factors have others.
    sizes = [geometry.heads // groups * head_dim, head_dim, head_dim]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return concatenate([t.unflatten(0, (groups, -1)) for t in tensors], dim=1).flatten(0, 1)

    def part(full: Tensor) -> tuple[Tensor, ...]:
        grouped = full.unflatten(0, (groups, -1))
        return tuple(t.flatten(0, 1) for t in grouped.split(sizes, dim=1))

    shapes = tuple((groups * size, *rest) for size in sizes)
    return Rule(megatron, hf, shapes, 0, join=join, part=part, num_layers=geometry.num_layers)


def gated(megatron: str, hf: tuple[str, str], shape: Shape, **flags: Any) -> Rule:
    """Gate and up projection -> linear_fc1, concatenated in dimension 0."""
    return Rule(
        megatron,
        hf,
        (shape, shape),
        0,
        join=concatenate,
        part=lambda full: full.chunk(2),
        glu=True,
        **flags,
    )
