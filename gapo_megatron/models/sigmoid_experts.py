"""Experts chosen by sigmoids of the router's logits, with a correction bias; dense layers first.

A token goes to the experts with the largest sigmoid + bias, of the best groups if there are groups;
a group counts by the sum of its best two. The chosen experts' sigmoids, divided by their sum and
times a factor, are their shares. The bias balances the experts' loads in pre-training (arXiv
2408.15664). Here it is a constant: part of the model in every other way, and never trained.
"""

from __future__ import annotations

from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.parts import COUNT

_NUMBER = ("a whole number of 0 or more", lambda value: type(value) is int and value >= 0)

FIELDS = {
    "n_routed_experts": COUNT,
    "n_shared_experts": COUNT,
    # transformers does not accept an integer here.
    "routed_scaling_factor": (
        "a number above 0 with a point or an exponent",
        lambda value: isinstance(value, float) and 0 < value < float("inf"),
    ),
    "n_group": COUNT,
    "topk_group": COUNT,
    "first_k_dense_replace": _NUMBER,
    "num_nextn_predict_layers": _NUMBER,
}
"""Rules of the fields of config.json; `num_nextn_predict_layers` is `Architecture.left_out`."""
REFUSED_FIELDS = {
    "num_local_experts": "another name of n_routed_experts",
    "num_mtp_layers": "another name of num_nextn_predict_layers",
}
"""transformers reads them as fields that vLLM knows by the published name alone -> why refused."""


def geometry_fields(config: Any) -> dict[str, Any]:
    """The experts' fields of `Geometry`."""
    return {
        "num_experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_intermediate": config.moe_intermediate_size,
        "shared_intermediate": config.moe_intermediate_size * config.n_shared_experts,
        "num_dense": config.first_k_dense_replace,
        "sigmoid_router": True,
    }


def transformer_fields(config: Any, g: Geometry) -> dict[str, Any]:
    """The experts' fields of TransformerConfig."""
    is_grouped = config.n_group > 1
    return {
        "num_moe_experts": g.num_experts,
        "moe_ffn_hidden_size": g.expert_intermediate,
        "moe_shared_expert_intermediate_size": g.shared_intermediate,
        # A list makes Megatron-core number the layers on disk, as `Rule.in_layers` does.
        "moe_layer_freq": [int(has) for has in g.has_experts] if g.num_dense else 1,
        "moe_router_topk": g.experts_per_token,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_num_groups": config.n_group if is_grouped else None,
        "moe_router_group_topk": config.topk_group if is_grouped else None,
        "moe_router_enable_expert_bias": True,
    }


def check(config: Any) -> None:
    """Refuse sizes that contradict each other.

    Raises:
        ConfigError: names the fields and their values.
    """
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    groups, best = config.n_group, config.topk_group
    if experts % groups or experts < 2 * groups:
        raise ConfigError(
            f"config.json: n_group ({groups}) must divide n_routed_experts ({experts}), with two "
            "experts or more in a group"
        )
    if best > groups:
        raise ConfigError(f"config.json: topk_group ({best}) must be n_group ({groups}) or less")
    if chosen > (reached := experts // groups * best):
        raise ConfigError(
            f"config.json: num_experts_per_tok ({chosen}) must be {reached} or less, the experts "
            f"in topk_group ({best}) groups"
        )
    if config.first_k_dense_replace >= config.num_hidden_layers:
        raise ConfigError(
            f"config.json: first_k_dense_replace ({config.first_k_dense_replace}) must be below "
            f"num_hidden_layers ({config.num_hidden_layers})"
        )


def check_computed(config: Any) -> None:
    """Refuse what Megatron-core's router or vLLM's classes do not compute.

    Raises:
        ConfigError: names the field and its value.
    """
    chosen, best = config.num_experts_per_tok, config.topk_group
    if config.tie_word_embeddings:
        raise ConfigError(
            "the model's tie_word_embeddings (true) must be false: vLLM's classes have an output "
            "layer of their own"
        )
    if not config.norm_topk_prob:
        raise ConfigError("the model's norm_topk_prob (false) must be true")
    if chosen == 1:
        # The expert's share is always 1.
        raise ConfigError("the model's num_experts_per_tok (1) must be 2 or more: norm_topk_prob")
    if best < config.n_group and chosen // best != 2:
        raise ConfigError(
            f"the model's topk_group ({best}) must be n_group ({config.n_group}), or its "
            f"num_experts_per_tok ({chosen}) from {2 * best} to {3 * best - 1}: Megatron-core "
            f"ranks a group by its best num_experts_per_tok // topk_group ({chosen // best}) "
            "experts, transformers and vLLM by its best 2"
        )
