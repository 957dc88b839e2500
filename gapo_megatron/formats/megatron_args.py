"""Megatron-LM's arguments that describe a model: those of ours, compared with a folder's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from gapo_megatron.models.parts import SCORES
from gapo_megatron.models.rope import Rope
from gapo_megatron.models.tables import architecture_of, geometry_of, rope_of

# Arguments and the fields of config.json with the same meaning.
_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "norm_epsilon": "rms_norm_eps",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
}
_LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
# Arguments that change what a model computes but neither names nor shapes, with the only value that
# is supported; None: not used.
_FIXED = {
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,  # norms stored less 1
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "no_rope_freq": None,
    "moe_shared_expert_gate": False,
}
# Gated activations by whether a model has gpt-oss's, in which up is added to 1.
_GATES = {
    False: {"swiglu": True, "quick_geglu": False, "glu_linear_offset": 0.0},
    True: {"swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0},
}
# What is not compared: names and shapes tell, or it does not belong to the model.
_NOT_COMPARED = {
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "max_position_embeddings"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
}
_NEUTRAL = {
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
}
"""What null, or 0, means where it does not mean that a feature is off."""
_NULL_IS_OFF = {
    *("window_size", "activation_func_clamp_value"),
    *("num_experts", "moe_shared_expert_intermediate_size"),
}
"""Where null says that a feature is off; elsewhere it is a default that depends on others."""

# rope_type "llama3": megatron-core fixes these, and only the factor is an argument.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# YaRN's numbers -> fields of config.json. Without latent attention the names begin with "yarn_".
_LATENT_YARN = {
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_YARN = {f"yarn_{name}": field for name, field in _LATENT_YARN.items()}
_YARN["yarn_correction_range_round_to_int"] = "truncate"
# Megatron-core's defaults for latent attention: what a config.json means that states neither.
_NO_MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.0}


def to_args(hf_config: PretrainedConfig) -> argparse.Namespace:
    """Megatron-LM's arguments that describe the model, for its `--use-checkpoint-args`.

    Parallel sizes are 1, because nothing in the folder depends on them. Rotary settings that
    arguments cannot express are left out (`_rope_args`).
    """
    # Arguments with a field of their own in config.json, and those that follow from its sizes.
    g = geometry_of(hf_config)
    args = {name: getattr(hf_config, field, None) for name, field in _FIELDS.items()}
    args |= {
        "kv_channels": g.head_dim,
        "ffn_hidden_size": g.intermediate,
        "group_query_attention": g.kv_heads != g.heads,
        "num_query_groups": g.kv_heads,
        "untie_embeddings_and_output_weights": not g.tied,
        "max_position_embeddings": hf_config.max_position_embeddings,
        "window_size": (g.window - 1, 0) if g.window else None,
        "window_attn_skip_freq": [int(is_windowed) for is_windowed in g.windowed] or None,
        "add_bias_linear": g.linear_biases,
        "add_qkv_bias": g.qkv_bias,
        "softmax_type": "learnable" if g.sinks else "vanilla",
        "num_experts": g.num_experts or None,
        "moe_ffn_hidden_size": g.expert_intermediate or None,
        "moe_shared_expert_intermediate_size": g.shared_intermediate or None,
        "qk_layernorm": g.head_norms or g.latent is not None,
        "multi_latent_attention": g.latent is not None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    if g.latent:
        args |= {name: getattr(hf_config, field) for name, field in _LATENT.items()}
    if g.num_experts:
        args |= {
            "moe_layer_freq": [int(has) for has in g.has_experts] if g.num_dense else 1,
            "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
            "moe_router_score_function": SCORES[g.sigmoid_router],
            "moe_router_enable_expert_bias": g.sigmoid_router,
        }
    if architecture_of(hf_config).megatron_layers:  # Megatron-LM's arguments do not build others
        clamp = {"activation_func_clamp_value": g.gate_limit or None}
        args |= _FIXED | _GATES[g.gate_limit > 0] | clamp
    args |= _rope_args(rope_of(hf_config.to_dict()), is_latent=g.latent is not None)
    return argparse.Namespace(**args)


def _rope_args(rope: Rope, *, is_latent: bool) -> dict[str, Any]:
    """Megatron-LM's arguments of a model's rotary positions.

    What arguments cannot express is left out, with the base, so that both must be given: "linear"
    scaling, other numbers of "llama3", a base of windowed layers.
    """
    args = {"position_embedding_type": "rope", "rotary_percent": rope.share}
    if is_latent:
        yarn = _NO_MSCALES | rope.scaling if rope.kind == "yarn" else {}
        kind = "yarn" if rope.kind == "yarn" else "rope"  # Megatron-core's default is "yarn"
        args |= {"rope_type": kind, "rotary_base": rope.base}
        return args | {name: yarn[of] for name, of in _LATENT_YARN.items() if yarn}
    if rope.kind == "yarn":
        args |= {"position_embedding_type": "yarn", "rotary_base": rope.base}
        return args | {name: rope.scaling.get(of) for name, of in _YARN.items()}
    factor = rope.scaling.get("factor", 1.0)
    is_known = rope.kind == "default" or rope.scaling == {"factor": factor, **_LLAMA3}
    if is_known and rope.windowed_base is None:
        args |= {
            "rotary_base": rope.base,
            "use_rope_scaling": rope.kind == "llama3",
            "rope_scaling_factor": factor,
        }
    return args


def differences(hf_config: PretrainedConfig, args: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Arguments of another model than config.json describes: name, value there, value here.

    An argument that is missing there, as of an older version, is not compared.
    """
    stated = {*_NEUTRAL, *_NULL_IS_OFF}
    theirs = {k: value for k, value in vars(args).items() if value is not None or k in stated}
    ours: dict[str, Any] = {**_FIXED, **vars(to_args(hf_config))}
    # What is said by other arguments, or has a meaning only beside them.
    ignored = {*_NOT_COMPARED}
    if ours["num_experts"]:
        ignored.add("ffn_hidden_size")
    elif not theirs.get("num_experts"):
        ignored |= {name for name in ours if name.startswith("moe_")}
    if ours.get("moe_router_score_function") == SCORES[True]:
        ignored.add("moe_router_pre_softmax")
    if ours["multi_latent_attention"]:
        ignored.add("kv_channels")
    if ours["multi_latent_attention"] or _num_groups(ours) == _num_groups(theirs):
        ignored |= {"group_query_attention", "num_query_groups"}
    if not ours.get("use_rope_scaling"):
        ignored.add("rope_scaling_factor")
    if not ours["window_size"]:
        ignored.add("window_attn_skip_freq")
    here, there = (_spelled(one, ours["num_layers"]) for one in (ours, theirs))
    found = [
        (name, theirs[name], value)
        for name, value in ours.items()
        if name in theirs and name not in ignored and there[name] != here[name]
    ]
    if "rotary_base" not in ours and theirs.get("rotary_base") is not None:
        found.append(("rotary_base", theirs["rotary_base"], "one of several, or scaled otherwise"))
    return found


def _num_groups(args: Mapping[str, Any]) -> Any:
    """Heads of keys and values."""
    return args.get(
        "num_query_groups" if args.get("group_query_attention") else "num_attention_heads"
    )


def _spelled(args: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The arguments in one spelling each."""
    one = {name: list(value) if isinstance(value, tuple) else value for name, value in args.items()}
    for name, neutral in _NEUTRAL.items():
        one[name] = one.get(name) or neutral
    if one.get("moe_layer_freq") == 1:
        one["moe_layer_freq"] = [1] * num_layers
    match one.get("window_attn_skip_freq"):
        case None:
            one["window_attn_skip_freq"] = [1] * num_layers
        case int(period) if period > 0:  # the last layer of each period has no window
            numbers = range(1, num_layers + 1)
            one["window_attn_skip_freq"] = [int(number % period > 0) for number in numbers]
    return {name: value or None for name, value in one.items()}
