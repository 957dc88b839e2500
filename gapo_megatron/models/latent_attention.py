"""Latent attention (DeepSeek-V2, arXiv 2405.04434): conversion rules of its projections.

Keys and values of all heads are made from one latent vector of a token; queries too, or straight
from the hidden state. Part of every query and key, `rope` elements, is rotated; that part of the
key is the same in all heads. Values may be smaller than queries and keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapo_megatron.models.fusions import same
from gapo_megatron.models.rules import Rule, Shape

if TYPE_CHECKING:
    from gapo_megatron.models.geometry import Geometry

_MCORE, _HF = "decoder.layers.{layer}.self_attention", "model.layers.{layer}.self_attn"


def rules(g: Geometry) -> list[Rule]:
    """Projections into and out of the latent vectors, with their norms, and the output's.

    Tensor parallelism cuts heads; what makes the latent vectors is whole on every rank.
    """
    latent = g.latent
    assert latent is not None
    wide = g.heads * g.head_dim
    of_query = [_rule("linear_q_proj.weight", "q_proj.weight", (wide, g.hidden), g, tp_dim=0)]
    if latent.query:
        of_query = [
            _rule("linear_q_down_proj.weight", "q_a_proj.weight", (latent.query, g.hidden), g),
            _norm("q", "q_a", latent.query, g),
            _rule("linear_q_up_proj.weight", "q_b_proj.weight", (wide, latent.query), g, tp_dim=0),
        ]
    down, up = latent.key_value + latent.rope, g.heads * (latent.nope + latent.value)
    return [
        *of_query,
        _rule("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", (down, g.hidden), g),
        _norm("kv", "kv_a", latent.key_value, g),
        _rule("linear_kv_up_proj.weight", "kv_b_proj.weight", (up, latent.key_value), g, tp_dim=0),
        _rule(
            "linear_proj.weight", "o_proj.weight", (g.hidden, g.heads * latent.value), g, tp_dim=1
        ),
    ]


def _rule(megatron: str, hf: str, shape: Shape, g: Geometry, **flags: Any) -> Rule:
    return same(f"{_MCORE}.{megatron}", f"{_HF}.{hf}", shape, num_layers=g.num_layers, **flags)


def _norm(megatron: str, hf: str, width: int, g: Geometry) -> Rule:
    """Rule of a latent vector's norm; Transformer Engine's is part of the projection after it."""
    te_name = f"{_MCORE}.linear_{megatron}_up_proj.layer_norm_weight"
    names = (f"{megatron}_layernorm.weight", f"{hf}_layernorm.weight")
    return _rule(*names, (width,), g, te_name=te_name)
