"""The conversion table of every architecture: all its parameters, in the order of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models.rules import Rule, Shape, concatenate

if TYPE_CHECKING:
    from torch import Tensor

_MCORE, _HF = "decoder.layers.{layer}", "model.layers.{layer}"


def rules_for(hf_config: Any) -> list[Rule]:
    """The conversion table of a model.

    Args:
        hf_config: `transformers.PretrainedConfig`, or any object with its attributes.

    Raises:
        ConfigError: the architecture has no table, or a setting that its table does not cover.
    """
    check_model_type(hf_config.model_type)
    _refuse(hf_config, "quantization_config")
    return _TABLES[hf_config.model_type][1](hf_config)


def check_model_type(model_type: str, *, source: str = "config.json") -> None:
    """Raise ConfigError unless the architecture has a table; `source` is for the error."""
    if model_type not in _TABLES:
        raise ConfigError(
            f"{source}: model_type {model_type!r} is not supported; "
            f"supported are {', '.join(_TABLES)}"
        )


# --- architectures -------------------------------------------------------------------------------


def _qwen2(hf_config: Any) -> list[Rule]:
    """Qwen2 and Qwen2.5 (DeepSeek-R1-Distill-Qwen too): biases on query, key and value only."""
    g = Geometry.of(hf_config)
    return [_embedding(g), *_attention(g, bias=True), *_mlp(g), *_output(g)]


def _llama(hf_config: Any) -> list[Rule]:
    """Llama 3, 3.1, 3.2 and Mistral: no biases."""
    _refuse(hf_config, "attention_bias", "mlp_bias")
    g = Geometry.of(hf_config)
    return [_embedding(g), *_attention(g), *_mlp(g), *_output(g)]


def _qwen3(hf_config: Any) -> list[Rule]:
    """Qwen3: no biases; a norm over every query and key head."""
    _refuse(hf_config, "attention_bias")
    g = Geometry.of(hf_config)
    return [_embedding(g), *_attention(g, norms=True), *_mlp(g), *_output(g)]


def _qwen3_moe(hf_config: Any) -> list[Rule]:
    """Qwen3 with experts in place of every layer's MLP; none is shared by all tokens."""
    _refuse(hf_config, "attention_bias", "mlp_only_layers")
    if hf_config.decoder_sparse_step != 1:
        raise ConfigError(
            f"config.json: decoder_sparse_step ({hf_config.decoder_sparse_step}) must be 1"
        )
    g = Geometry.of(hf_config)
    return [_embedding(g), *_attention(g, norms=True), *_experts(g, hf_config), *_output(g)]


def _refuse(hf_config: Any, *fields: str) -> None:
    for field in fields:
        if value := getattr(hf_config, field, None):
            raise ConfigError(
                f"config.json: {field} ({value}) is not supported for {hf_config.model_type} models"
            )


_TABLES: dict[str, tuple[str, Callable[[Any], list[Rule]]]] = {
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _llama),
}
ARCHITECTURES = {model_type: name for model_type, (name, _) in _TABLES.items()}
"""model_type of config.json -> the one entry of its `architectures`, of every supported model."""


# --- parts of a model ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a dense decoder that decide tensor shapes."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Not always hidden / heads."""
    intermediate: int
    vocab: int
    tied: bool
    """The output layer is the embedding."""

    @classmethod
    def of(cls, hf_config: Any) -> Geometry:
        """Read the sizes off a Hugging Face config (any object with its attributes)."""
        heads = hf_config.num_attention_heads
        return cls(
            num_layers=hf_config.num_hidden_layers,
            hidden=hf_config.hidden_size,
            heads=heads,
            kv_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
            intermediate=hf_config.intermediate_size,
            vocab=hf_config.vocab_size,
            tied=bool(hf_config.tie_word_embeddings),
        )


def _embedding(g: Geometry) -> Rule:
    shape = (g.vocab, g.hidden)
    return _same(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        shape,
        tp_dim=0,
        vocab_padded=True,
    )


def _attention(g: Geometry, *, bias: bool = False, norms: bool = False) -> list[Rule]:
    """Input norm, query, key, value (with biases; with norms over a head's), projection."""
    mcore, hf, layers = f"{_MCORE}.self_attention", f"{_HF}.self_attn", g.num_layers
    q, k, v = (f"{hf}.{name}_proj" for name in "qkv")
    # fmt: off
    rules = [
        _same(f"{_MCORE}.input_layernorm.weight", f"{_HF}.input_layernorm.weight", (g.hidden,),
              num_layers=layers, te_name=f"{mcore}.linear_qkv.layer_norm_weight"),
        _fused_qkv(f"{mcore}.linear_qkv.weight", (f"{q}.weight", f"{k}.weight", f"{v}.weight"), g),
    ]
    if bias:
        names = (f"{q}.bias", f"{k}.bias", f"{v}.bias")
        rules.append(_fused_qkv(f"{mcore}.linear_qkv.bias", names, g))
    if norms:
        rules += [
            _same(f"{mcore}.{x}_layernorm.weight", f"{hf}.{x}_norm.weight", (g.head_dim,),
                  num_layers=layers)
            for x in "qk"
        ]
    return [
        *rules,
        _same(f"{mcore}.linear_proj.weight", f"{hf}.o_proj.weight",
              (g.hidden, g.heads * g.head_dim), tp_dim=1, num_layers=layers),
    ]
    # fmt: on


def _mlp(g: Geometry) -> list[Rule]:
    """Norm, gate and up projection, down projection."""
    mcore, hf, layers = f"{_MCORE}.mlp", f"{_HF}.mlp", g.num_layers
    # fmt: off
    return [
        _same(f"{_MCORE}.pre_mlp_layernorm.weight", f"{_HF}.post_attention_layernorm.weight",
              (g.hidden,), num_layers=layers, te_name=f"{mcore}.linear_fc1.layer_norm_weight"),
        _gated(f"{mcore}.linear_fc1.weight",
               (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), (g.intermediate, g.hidden),
               num_layers=layers),
        _same(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight",
              (g.hidden, g.intermediate), tp_dim=1, num_layers=layers),
    ]
    # fmt: on


def _experts(g: Geometry, hf_config: Any) -> list[Rule]:
    """Norm, router, and every expert's gate, up and down projection."""
    mcore, hf = f"{_MCORE}.mlp.experts", f"{_HF}.mlp.experts.{{expert}}"
    local = f"{mcore}.local_experts.{{expert}}"
    size, number = hf_config.moe_intermediate_size, hf_config.num_experts
    repeats = {"num_layers": g.num_layers, "num_experts": number}
    # fmt: off
    return [
        _same(f"{_MCORE}.pre_mlp_layernorm.weight", f"{_HF}.post_attention_layernorm.weight",
              (g.hidden,), num_layers=g.num_layers),
        _same(f"{_MCORE}.mlp.router.weight", f"{_HF}.mlp.gate.weight", (number, g.hidden),
              num_layers=g.num_layers),
        _gated(f"{local}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"),
               (size, g.hidden), te_name=f"{mcore}.linear_fc1.weight{{expert}}", **repeats),
        _same(f"{local}.linear_fc2.weight", f"{hf}.down_proj.weight", (g.hidden, size),
              tp_dim=1, te_name=f"{mcore}.linear_fc2.weight{{expert}}", **repeats),
    ]
    # fmt: on


def _output(g: Geometry) -> list[Rule]:
    """Final norm; output layer: a tensor of its own, or the embedding's second home."""
    hf = "model.embed_tokens.weight" if g.tied else "lm_head.weight"
    shape = (g.vocab, g.hidden)
    return [
        _same("decoder.final_layernorm.weight", "model.norm.weight", (g.hidden,)),
        _same("output_layer.weight", hf, shape, tp_dim=0, vocab_padded=True, tied=g.tied),
    ]


# --- the ways a parameter is made ----------------------------------------------------------------


def _same(megatron: str, hf: str, shape: Shape, *, tp_dim: int | None = None, **flags: Any) -> Rule:
    """One tensor under two names."""
    return Rule(
        megatron, (hf,), (shape,), tp_dim, join=lambda t: t[0], part=lambda full: (full,), **flags
    )


def _fused_qkv(megatron: str, hf: tuple[str, str, str], geometry: Geometry) -> Rule:
    """Query, key, value -> linear_qkv, interleaved by key/value group.

    Megatron keeps what one attention group needs together: for each key/value head its query heads,
    the key head, the value head. Tensor parallelism then cuts between groups. Weights are
    [heads * head_dim, hidden], biases [heads * head_dim].
    """
    groups, head_dim = geometry.kv_heads, geometry.head_dim
    if geometry.heads % groups:
        raise ConfigError(
            f"config.json: num_key_value_heads ({groups}) must divide "
            f"num_attention_heads ({geometry.heads})"
        )
    rest = () if hf[0].endswith(".bias") else (geometry.hidden,)
    sizes = [geometry.heads // groups * head_dim, head_dim, head_dim]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return concatenate([t.reshape(groups, -1, *rest) for t in tensors], dim=1).flatten(0, 1)

    def part(full: Tensor) -> tuple[Tensor, ...]:
        grouped = full.reshape(groups, -1, *rest)
        return tuple(t.flatten(0, 1) for t in grouped.split(sizes, dim=1))

    shapes = tuple((groups * size, *rest) for size in sizes)
    return Rule(megatron, hf, shapes, 0, join=join, part=part, num_layers=geometry.num_layers)


def _gated(megatron: str, hf: tuple[str, str], shape: Shape, **flags: Any) -> Rule:
    """Gate and up projection -> linear_fc1, one above the other."""
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
