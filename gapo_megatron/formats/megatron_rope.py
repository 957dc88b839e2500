"""Rotary positions in Megatron-LM's arguments, which have a spelling for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapo_megatron.models.rope import Rope

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

ROPE_ARGS = (
    *("position_embedding_type", "rope_type", "rotary_base", "rotary_percent"),
    *("use_rope_scaling", "rope_scaling_factor", *_LATENT_YARN, *_YARN),
)
"""Arguments that `rope_fields` reads."""


def rope_args(rope: Rope, *, is_latent: bool) -> dict[str, Any]:
    """Megatron-LM's arguments of a model's rotary positions.

    What arguments cannot express is left out, with the base, so that both must be given: "linear"
    scaling, other numbers of "llama3", a base of windowed layers.

    Args:
        rope: the model's settings.
        is_latent: whether its attention is latent.
    """
    args = {"position_embedding_type": "rope", "rotary_percent": rope.share}
    if is_latent:
        yarn = _NO_MSCALES | rope.scaling if rope.kind == "yarn" else {}
        kind = "yarn" if rope.kind == "yarn" else "rope"  # Megatron-core's default is "yarn"
        args |= {"rope_type": kind, "rotary_base": rope.base}
        return args | {name: yarn[of] for name, of in _LATENT_YARN.items() if of in yarn}
    if rope.kind == "yarn":
        args |= {"position_embedding_type": "yarn", "rotary_base": rope.base}
        return args | {name: rope.scaling[of] for name, of in _YARN.items() if of in rope.scaling}
    factor = rope.scaling.get("factor", 1.0)
    is_known = rope.kind == "default" or rope.scaling == {"factor": factor, **_LLAMA3}
    if is_known and rope.windowed_base is None:
        args |= {
            "rotary_base": rope.base,
            "use_rope_scaling": rope.kind == "llama3",
            "rope_scaling_factor": factor,
        }
    return args


def rope_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json about rotary positions, if the arguments state their kind and base.

    A kind without scaling is stated, too: config.json's default may be another.
    """
    is_latent = bool(args.get("multi_latent_attention"))
    kind = args.get("rope_type" if is_latent else "position_embedding_type")
    if kind is None or args.get("rotary_base") is None:
        return {}
    scaling: dict[str, Any] = {"rope_type": "default" if kind == "rope" else kind}
    if kind == "yarn":
        stated = {of: args.get(name) for name, of in (_LATENT_YARN if is_latent else _YARN).items()}
        if is_latent and all(stated[name] == value for name, value in _NO_MSCALES.items()):
            stated |= dict.fromkeys(_NO_MSCALES)
        scaling |= {of: value for of, value in stated.items() if value is not None}
    elif kind == "rope" and not is_latent and args.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": args.get("rope_scaling_factor"), **_LLAMA3}
    return {
        "rope_theta": args["rotary_base"],
        "partial_rotary_factor": None if is_latent else args.get("rotary_percent"),
        "rope_scaling": scaling,
    }
