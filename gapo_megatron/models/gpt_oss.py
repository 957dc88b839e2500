"""gpt-oss: attention with sinks, a window in every second layer; experts and biases in all.

Hugging Face folders store the experts of a layer in one tensor each (`formats.stacks`), input
dimension first, with the columns of gate and up projection alternating. Published weights of
experts are MXFP4, which is read but never written. The gated product is clamped, and up is added
to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models import parts
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.parts import WINDOWED, same
from gapo_megatron.models.quantization import MXFP4
from gapo_megatron.models.rope import Rope, read_rope
from gapo_megatron.models.rules import Rule

if TYPE_CHECKING:
    from torch import Tensor

# What vLLM's class has in its code, where transformers' reads config.json.
_CONSTANTS = {
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_NUMBER = (
    "a number above 0 with a point or an exponent",
    lambda value: isinstance(value, float) and value > 0,
)


def _complete(facts: dict[str, Any]) -> None:
    """The kinds of layers alternate, unless they are listed."""
    if facts["layer_types"] is None:
        facts["layer_types"] = parts.periodic_layer_types(2, facts["num_hidden_layers"])


def _read_rope(fields: Mapping[str, Any], *, source: str = "config.json") -> Rope:
    """Read the rope settings; defaults are those of the published models."""
    if all(fields.get(name) is None for name in ("rope_scaling", "rope_parameters")):
        fields = {**fields, "rope_scaling": _YARN}
    nested = fields.get("rope_parameters")
    is_stated = isinstance(nested, Mapping) and nested.get("rope_theta") is not None
    if fields.get("rope_theta") is None and not is_stated:
        fields = {**fields, "rope_theta": 150_000.0}
    rope = read_rope(fields, source=source)
    if rope.kind != "yarn":
        raise ConfigError(
            f"{source}: rope_type ({rope.kind!r}), in rope_scaling or rope_parameters, must be "
            "'yarn': vLLM reads no other"
        )
    stated = [one for one in (fields.get("rope_scaling"), nested) if isinstance(one, Mapping)]
    for name in ("beta_fast", "beta_slow"):
        if all(one.get(name) is None for one in stated):
            raise ConfigError(
                f"{source}: {name} is missing in rope_scaling or rope_parameters: vLLM has no "
                "default for it"
            )
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if name in rope.scaling:
            raise ConfigError(
                f"{source}: {name} ({rope.scaling[name]}) is not supported: vLLM does not read it"
            )
    return rope


def _geometry(config: Any) -> Geometry:
    return Geometry.of(
        config,
        qkv_bias=True,
        linear_biases=True,
        sinks=True,
        window=config.sliding_window or 0,
        windowed=tuple(kind == WINDOWED for kind in config.layer_types),
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        expert_intermediate=config.intermediate_size,
        gate_limit=config.swiglu_limit,
    )


def _transformer_fields(config: Any, g: Geometry) -> dict[str, Any]:
    from gapo_megatron.compat.megatron_experts import quick_gelu

    return {
        **parts.transformer_fields(config, g),
        "softmax_type": "learnable",
        "activation_func": quick_gelu,
        "activation_func_clamp_value": g.gate_limit,
        "glu_linear_offset": 1.0,
        "num_moe_experts": g.num_experts,
        "moe_ffn_hidden_size": g.expert_intermediate,
        "moe_router_topk": g.experts_per_token,
        "moe_router_pre_softmax": False,
    }


def _rules(g: Geometry) -> list[Rule]:
    return [parts.embedding(g), *parts.attention(g), *_experts(g), *parts.output(g)]


def _experts(g: Geometry) -> list[Rule]:
    """Norm, router, and every expert's projections, each with its bias."""
    mcore, hf = "decoder.layers.{layer}", "model.layers.{layer}"
    local, grouped = f"{mcore}.mlp.experts.local_experts.{{expert}}", f"{mcore}.mlp.experts"
    of_expert = f"{hf}.mlp.experts.{{expert}}"
    size, number, layers = g.expert_intermediate, g.num_experts, {"num_layers": g.num_layers}

    def one(name: str, kind: str, of: str, shape: tuple[int, ...]) -> dict[str, Any]:
        return {
            "megatron": f"{local}.{name}.{kind}",
            "hf": (f"{of_expert}.{of}",),
            "hf_shapes": (shape,),
            "te_name": f"{grouped}.{name}.{kind}{{expert}}",
            "num_experts": number,
            **layers,
        }

    fc1, fc2 = "linear_fc1", "linear_fc2"
    # fmt: off
    return [
        same(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight",
             (g.hidden,), **layers),
        same(f"{mcore}.mlp.router.weight", f"{hf}.mlp.router.weight", (number, g.hidden), **layers),
        same(f"{mcore}.mlp.router.bias", f"{hf}.mlp.router.bias", (number,), **layers),
        Rule(**one(fc1, "weight", "gate_up_proj", (g.hidden, 2 * size)), tp_dim=0, glu=True,
             join=lambda t: _gate_above_up(t[0].T), part=lambda full: (_alternating(full).T,),
             shape=(2 * size, g.hidden)),
        Rule(**one(fc1, "bias", "gate_up_proj_bias", (2 * size,)), tp_dim=0, glu=True,
             join=lambda t: _gate_above_up(t[0]), part=lambda full: (_alternating(full),)),
        Rule(**one(fc2, "weight", "down_proj", (size, g.hidden)), tp_dim=1,
             join=lambda t: t[0].T, part=lambda full: (full.T,), shape=(g.hidden, size)),
        Rule(**one(fc2, "bias", "down_proj_bias", (g.hidden,)), tp_dim=None,
             join=lambda t: t[0], part=lambda full: (full,)),
    ]
    # fmt: on


def _gate_above_up(rows: Tensor) -> Tensor:
    """Rows gate 0, up 0, gate 1, up 1, ... [2 f, ...] -> all of gate, then all of up."""
    return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def _alternating(full: Tensor) -> Tensor:
    """Inverse of `_gate_above_up`."""
    return full.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def _check(config: Any) -> None:
    for name, value in _CONSTANTS.items():
        if (found := getattr(config, name)) != value:
            raise ConfigError(
                f"config.json: {name} ({found!r}) must be {value!r}: vLLM reads no other"
            )
    alternating = parts.periodic_layer_types(2, config.num_hidden_layers)
    if list(config.layer_types) != alternating:
        raise ConfigError(
            f"config.json: layer_types ({list(config.layer_types)!r:.80}) must alternate, "
            f"beginning with {WINDOWED}: vLLM reads no other"
        )
    if not config.sliding_window:
        raise ConfigError(f"config.json: sliding_window (null) must be {parts.COUNT[0]}")
    if config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok ({config.num_experts_per_tok}) must be num_experts "
            f"({config.num_experts}) or less"
        )


def _check_computed(config: Any) -> None:
    if config.num_experts_per_tok == 1:
        # The expert's share is always 1, so the router would have no gradient.
        raise ConfigError("the model's num_experts_per_tok (1) must be 2 or more")


GPT_OSS = Architecture(
    model_type="gpt_oss",
    hf_class="GptOssForCausalLM",
    published={name: f"openai/{name}" for name in ("gpt-oss-20b", "gpt-oss-120b")},
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "sliding_window": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    fields={
        "sliding_window": parts.COUNT,
        "swiglu_alpha": _NUMBER,
        "swiglu_limit": _NUMBER,
    },
    quantizations=(MXFP4,),
    stacks_experts=True,
    complete=_complete,
    rope_kinds=("yarn",),
    read_rope=_read_rope,
    geometry=_geometry,
    rules=_rules,
    transformer_fields=_transformer_fields,
    check=_check,
    check_computed=_check_computed,
)
