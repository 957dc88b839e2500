"""DeepSeek-V3 and Moonlight: latent attention, and sigmoid-routed experts behind dense layers.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as in transformers.
DeepSeek-V3's published weights are FP8, which is read but never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models import parts, sigmoid_experts
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry, Latent
from gapo_megatron.models.parts import COUNT
from gapo_megatron.models.quantization import FP8
from gapo_megatron.models.rope import Rope, read_rope

# What vLLM takes for another router if it is missing, and transformers does not read.
_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _complete(facts: dict[str, Any]) -> None:
    """Transformers calls the rotated part of a head head_dim."""
    if facts["head_dim"] not in (0, rotated := facts["qk_rope_head_dim"]):
        raise ConfigError(
            f"config.json: head_dim ({facts['head_dim']}) must be qk_rope_head_dim ({rotated})"
        )
    facts["head_dim"] = rotated


def _geometry(config: Any) -> Geometry:
    latent = Latent(
        query=config.q_lora_rank or 0,
        key_value=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
    )
    return Geometry.of(
        config,
        head_dim=latent.nope + latent.rope,
        latent=latent,
        **sigmoid_experts.geometry_fields(config),
    )


def _transformer_fields(config: Any, g: Geometry) -> dict[str, Any]:
    latent, rope = g.latent, _read_rope(config.to_dict())
    assert latent is not None
    scaling = {}
    if rope.kind == "yarn":
        names = {"factor": "rotary_scaling_factor", "mscale": "mscale"}
        names |= {name: name for name in ("mscale_all_dim", "beta_fast", "beta_slow")}
        names["original_max_position_embeddings"] = "original_max_position_embeddings"
        scaling = {ours: rope.scaling[name] for name, ours in names.items() if name in rope.scaling}
    return {
        **parts.transformer_fields(config, g),
        **sigmoid_experts.transformer_fields(config, g),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": latent.query or None,
        "kv_lora_rank": latent.key_value,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.base,
        **({"rotary_scaling_factor": 1.0} | scaling),
    }


def _read_rope(fields: Mapping[str, Any], *, source: str = "config.json") -> Rope:
    """The rotary settings; of YaRN what transformers and vLLM compute alike."""
    rope = read_rope(fields, source=source)
    stated = rope.scaling
    if ("mscale" in stated) != ("mscale_all_dim" in stated):
        raise ConfigError(
            f"{source}: mscale and mscale_all_dim must both be there, or none: transformers and "
            "vLLM take one alone differently"
        )
    for name, neutral in (("attention_factor", None), ("truncate", True)):
        if stated.get(name, neutral) != neutral:
            raise ConfigError(
                f"{source}: {name} ({stated[name]}) is not supported: vLLM does not read it for "
                "this model"
            )
    return rope


def _check(config: Any) -> None:
    parts.refuse_set(config, "attention_bias")
    sigmoid_experts.check(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads != heads:
        raise ConfigError(
            f"config.json: num_key_value_heads ({kv_heads}) must be num_attention_heads ({heads}): "
            "every head has keys and values of its own"
        )


def _check_computed(config: Any) -> None:
    parts.check_computed(config)
    sigmoid_experts.check_computed(config)
    whole = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.v_head_dim > whole:
        raise ConfigError(
            f"the model's v_head_dim ({config.v_head_dim}) must be at most qk_nope_head_dim + "
            f"qk_rope_head_dim ({whole}): vLLM has no attention with larger values"
        )
    # What a config leaves out is transformers' default, which vLLM does not know of the router.
    for field, value, default in (
        *((field, value, None) for field, value in _ROUTER.items()),
        *(("rope_interleave", True, True), ("moe_layer_freq", 1, 1)),
    ):
        if (stated := getattr(config, field, default)) != value:
            raise ConfigError(
                f"the model's {field} ({stated!r}) must be {value!r}: transformers and vLLM would "
                "compute different models"
            )


DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    published={
        "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
        "Moonlight-16B-A3B": "moonshotai/Moonlight-16B-A3B",
    },
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "head_dim": 0,  # derived; null is another size to transformers
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "moe_layer_freq": 1,
        "topk_method": None,
        "scoring_func": None,
    },
    fields=sigmoid_experts.FIELDS
    | dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), COUNT
    )
    | {
        "rope_interleave": ("true or false", lambda value: isinstance(value, bool)),
        "moe_layer_freq": COUNT,
        **dict.fromkeys(_ROUTER, ("a string", lambda value: isinstance(value, str))),
    },
    nullable=("num_key_value_heads", "q_lora_rank"),
    refused_fields=sigmoid_experts.REFUSED_FIELDS
    | dict.fromkeys(
        ("index_topk", "rswa_window", "moe_router_dtype"),
        "vLLM computes another model with it, transformers does not read it",
    ),
    quantizations=(FP8,),
    rope_kinds=("default", "yarn"),
    read_rope=_read_rope,
    left_out="num_nextn_predict_layers",
    complete=_complete,
    geometry=_geometry,
    transformer_fields=_transformer_fields,
    check=_check,
    check_computed=_check_computed,
)
