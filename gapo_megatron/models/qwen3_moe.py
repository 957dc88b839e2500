"""Qwen3 with experts in place of every layer's MLP; no expert is shared by all tokens."""

from __future__ import annotations

from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models import parts, qwen2
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry

_DEFAULTS = qwen2.DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
}


def _complete(facts: dict[str, Any]) -> None:
    qwen2.complete(facts)
    if facts["mlp_only_layers"] is None:
        facts["mlp_only_layers"] = []


def _geometry(config: Any) -> Geometry:
    return Geometry.of(
        config,
        head_norms=True,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        expert_intermediate=config.moe_intermediate_size,
    )


def _transformer_fields(config: Any, g: Geometry) -> dict[str, Any]:
    return {
        **parts.transformer_fields(config, g),
        "num_moe_experts": g.num_experts,
        "moe_ffn_hidden_size": g.expert_intermediate,
        "moe_router_topk": g.experts_per_token,
        # Normalised shares of a softmax over all experts equal a softmax over the chosen ones.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


def _check(config: Any) -> None:
    parts.refuse_set(config, "attention_bias", "mlp_only_layers")
    if config.decoder_sparse_step != 1:
        raise ConfigError(
            f"config.json: decoder_sparse_step ({config.decoder_sparse_step}) must be 1"
        )
    if config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok ({config.num_experts_per_tok}) must be num_experts "
            f"({config.num_experts}) or less"
        )


def _check_computed(config: Any) -> None:
    parts.check_computed(config)
    if config.num_experts_per_tok == 1 and config.norm_topk_prob:
        # The expert's share is always 1, so the router would have no gradient.
        raise ConfigError("the model's num_experts_per_tok (1) must be 2 or more: norm_topk_prob")


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    published={"Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B"},
    defaults=_DEFAULTS,
    nullable=("mlp_only_layers",),
    complete=_complete,
    geometry=_geometry,
    transformer_fields=_transformer_fields,
    check=_check,
    check_computed=_check_computed,
)
