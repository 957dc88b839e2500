"""GLM-4.5: sigmoid-routed experts behind a few dense layers, and a shared expert.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models import parts, sigmoid_experts
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.rope import Rope, read_rope

_SHARE = "partial_rotary_factor"


def _geometry(config: Any) -> Geometry:
    return Geometry.of(
        config,
        qkv_bias=config.attention_bias,
        head_norms=config.use_qk_norm,
        **sigmoid_experts.geometry_fields(config),
    )


def _transformer_fields(config: Any, g: Geometry) -> dict[str, Any]:
    return parts.transformer_fields(config, g) | sigmoid_experts.transformer_fields(config, g)


def _read_rope(fields: Mapping[str, Any], *, source: str = "config.json") -> Rope:
    """The rotary settings; without a partial_rotary_factor half of each head is rotated.

    transformers fills in the factor beside `rope_parameters`, which may state another: that counts.
    """
    nested = fields.get("rope_parameters")
    nested = nested if isinstance(nested, Mapping) else {}
    if any(_SHARE in stated and stated[_SHARE] is None for stated in (fields, nested)):
        raise ConfigError(
            f"{source}: {_SHARE} (null) must be a number: of null, readers differ in what they take"
        )
    is_nested = _SHARE in nested
    share = None if is_nested else fields.get(_SHARE, 0.5)
    return read_rope({**fields, _SHARE: share}, source=source)


def _check_computed(config: Any) -> None:
    if not getattr(config, "head_dim", None):
        raise ConfigError("the model's head_dim must be given: vLLM has no default for it")
    parts.check_computed(config, biases=("attention_bias",))
    sigmoid_experts.check_computed(config)


GLM4_MOE = Architecture(
    model_type="glm4_moe",
    hf_class="Glm4MoeForCausalLM",
    published={"GLM-4.5": "zai-org/GLM-4.5", "GLM-4.5-Air": "zai-org/GLM-4.5-Air"},
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    fields=sigmoid_experts.FIELDS
    | {"use_qk_norm": ("true or false", lambda value: isinstance(value, bool))},
    refused_fields=sigmoid_experts.REFUSED_FIELDS,
    partial_rotary=True,
    read_rope=_read_rope,
    gives_hidden_states=False,
    left_out="num_nextn_predict_layers",
    geometry=_geometry,
    transformer_fields=_transformer_fields,
    check=sigmoid_experts.check,
    check_computed=_check_computed,
)
