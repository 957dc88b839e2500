"""Gemma 3, text only: norms before and behind attention and MLP, windows in most layers.

Embeddings are scaled, norms store their weight less 1, windowed layers have a rotary base of their
own, and the scale of attention scores is given apart from head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models import parts
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.parts import FULL, WINDOWED
from gapo_megatron.models.rope import Rope, read_rope

_PATTERN, _LOCAL_BASE = "sliding_window_pattern", "rope_local_base_freq"
# transformers does not accept an integer here.
_CAP = (
    "null or a number above 0 with a point or an exponent",
    lambda value: isinstance(value, float) and value > 0,
)


def _complete(facts: dict[str, Any]) -> None:
    """Every sixth layer sees all keys, unless the layers are listed."""
    period = facts.pop(_PATTERN)
    if facts["layer_types"] is None:
        facts["layer_types"] = parts.periodic_layer_types(period, facts["num_hidden_layers"])


def _geometry(config: Any) -> Geometry:
    return Geometry.of(
        config,
        head_norms=True,
        output_norms=True,
        window=config.sliding_window or 0,
        windowed=tuple(kind == WINDOWED for kind in config.layer_types),
        embedding_scale=config.hidden_size**0.5,
    )


def _transformer_fields(config: Any, g: Geometry) -> dict[str, Any]:
    import functools

    import torch.nn.functional as F

    return {
        **parts.transformer_fields(config, g),
        "activation_func": functools.partial(F.gelu, approximate="tanh"),
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": config.query_pre_attn_scalar**-0.5,
    }


def _read_rope(fields: Mapping[str, Any], *, source: str = "config.json") -> Rope:
    """The rotary settings of layers that see all keys, with the base of the others."""
    nested = {} if fields.get("rope_parameters") is None else fields["rope_parameters"]
    if (
        not isinstance(nested, Mapping)
        or not nested.keys() <= {FULL, WINDOWED}
        or not all(isinstance(one, Mapping | None) for one in nested.values())
    ):
        raise ConfigError(
            f"{source}: rope_parameters ({nested!a:.80}) must be a table of {FULL} and {WINDOWED}"
        )
    for table in (fields.get("rope_scaling"), *nested.values()):
        if isinstance(table, Mapping) and "type" in table and "rope_type" not in table:
            raise ConfigError(
                f"{source}: rope_type must be named so, not type ({table['type']!a:.80}): "
                "transformers would take the default for this model"
            )
    full, windowed = (
        {name: fields.get(name), "rope_parameters": nested.get(kind)}
        for kind, name in ((FULL, "rope_theta"), (WINDOWED, _LOCAL_BASE))
    )
    if full["rope_theta"] is None and (nested.get(FULL) or {}).get("rope_theta") is None:
        full["rope_theta"] = 1_000_000.0
    full |= {name: fields.get(name) for name in ("rope_scaling", "partial_rotary_factor")}
    whole = read_rope(full, source=source)
    local = read_rope(windowed, source=f"{source}: {WINDOWED}", base_field=_LOCAL_BASE)
    if local.kind != "default" or local.share != 1.0:
        raise ConfigError(
            f"{source}: rope_type ({local.kind!r}) of {WINDOWED} must be 'default', and its "
            f"partial_rotary_factor ({local.share}) 1"
        )
    return Rope(whole.base, whole.kind, whole.scaling, whole.share, windowed_base=local.base)


def _check(config: Any) -> None:
    parts.refuse_set(config, "attention_bias")
    if not config.sliding_window and WINDOWED in config.layer_types:
        raise ConfigError(
            f"config.json: sliding_window (null) must be {parts.COUNT[0]} for a model whose "
            f"layer_types name {WINDOWED}"
        )


def _check_computed(config: Any) -> None:
    for field in (
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "use_bidirectional_attention",
    ):
        if value := getattr(config, field):
            raise ConfigError(f"the model's {field} ({value}) is not supported")
    if config.hidden_activation != "gelu_pytorch_tanh":
        raise ConfigError(
            f"the model's hidden_activation ({config.hidden_activation!r}) must be "
            "'gelu_pytorch_tanh'"
        )


GEMMA3_TEXT = Architecture(
    model_type="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    published={
        "gemma-3-270m-it": "google/gemma-3-270m-it",
        "gemma-3-1b-it": "google/gemma-3-1b-it",
    },
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        _PATTERN: 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    fields={
        "hidden_activation": ("a string", lambda value: isinstance(value, str)),
        "query_pre_attn_scalar": parts.COUNT,
        "sliding_window": parts.COUNT,
        "final_logit_softcapping": _CAP,
        "attn_logit_softcapping": _CAP,
        "use_bidirectional_attention": (
            "true or false",
            lambda value: isinstance(value, bool),
        ),
    },
    nullable=("use_bidirectional_attention",),
    rope_kinds=("default", "linear"),
    read_rope=_read_rope,
    megatron_layers=False,
    gives_hidden_states=False,
    complete=_complete,
    geometry=_geometry,
    transformer_fields=_transformer_fields,
    check=_check,
    check_computed=_check_computed,
)
