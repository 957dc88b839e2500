"""Read config.json of a model without transformers, for command lines, dry runs and plans.

Gives the values of transformers' `PretrainedConfig` for the fields that this package uses, with
defaults, or an error that names field, value and rule. transformers only checks types; here sizes
must also be positive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.io.documents import read_json
from gapo_megatron.models import parts
from gapo_megatron.models.architecture import Architecture, FieldRule
from gapo_megatron.models.rope import Rope
from gapo_megatron.models.tables import architecture_of, rope_of, rules_for

FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Dtypes that a weight may have; narrower ones would need a scale."""

_ATTENTIONS = (parts.FULL, parts.WINDOWED)
# Largest accepted sizes, several times those of published models: some tables have an entry for
# every layer and expert.
_SIZES = {
    "num_hidden_layers": 2**10,
    "hidden_size": 2**20,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**24,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31 - 1,
    "num_experts": 2**11,
    "num_experts_per_tok": 2**11,
    "moe_intermediate_size": 2**20,
    "decoder_sparse_step": 2**10,
    "sliding_window_pattern": 2**10,
}
_SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "use_sliding_window",
)

# Fields that no architecture here has -> who reads them all the same, and computes something else.
_READ_BY = {
    **dict.fromkeys(
        (
            *("ada_rms_norm_t_cond", "attn_logit_softcapping", "compression_config"),
            *("dual_chunk_attention_config", "final_logit_softcapping", "head_dtype"),
            *("hidden_size_per_head", "kv_lora_rank", "llama_4_scaling", "logit_scale"),
            *("mrope_section", "n_head_kv", "num_kv_heads", "qk_norm"),
            *("shared_expert_intermediate_size", "target_layer_count", "xdrope_section"),
        ),
        "vLLM",
    ),
    **dict.fromkeys(("per_layer_config", "transformers_weights"), "transformers"),
    **dict.fromkeys(("decoder", "generator", "text_config", "text_encoder"), "both libraries"),
}


def _size_rule(largest: int) -> FieldRule:
    # bool is a subclass of int, and not accepted
    return f"a whole number of 1 to {largest}", lambda v: type(v) is int and 0 < v <= largest


_RULES: dict[str, FieldRule] = {
    **{name: _size_rule(largest) for name, largest in _SIZES.items()},
    **dict.fromkeys(_SWITCHES, ("true or false", lambda value: isinstance(value, bool))),
    "hidden_act": ("a string", lambda value: isinstance(value, str)),
    # transformers does not accept an integer here.
    "rms_norm_eps": (
        "a number between 0 and 1 with a point or an exponent",
        lambda value: isinstance(value, float) and 0 < value < 1,
    ),
    "sliding_window": (
        "null or a whole number of 0 or more",
        lambda value: type(value) is int and value >= 0,
    ),
    "mlp_only_layers": (
        "a list of layer numbers",
        lambda value: isinstance(value, list) and all(type(n) is int and n >= 0 for n in value),
    ),
    "layer_types": (
        f"a list of {' and '.join(_ATTENTIONS)}",
        lambda value: isinstance(value, list) and all(one in _ATTENTIONS for one in value),
    ),
}


class ModelFacts(SimpleNamespace):
    """Fields of config.json as attributes, with a `to_dict` like transformers' config."""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dict(vars(self))


def read_facts(folder: str | Path) -> ModelFacts:
    """Read config.json of a folder, if its architecture is supported.

    Raises:
        ConfigError: config.json is missing, not supported or contradicts itself (architecture and
            model type, or two rope settings), or a value has the wrong type or sign.
    """
    path = Path(folder) / "config.json"
    try:
        fields = read_json(path)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return facts_of(fields, source=str(path))


def read_model_facts(hf_dir: str) -> ModelFacts:
    """Read config.json of `model.hf_dir`; errors name that setting, see `read_facts`."""
    try:
        return read_facts(hf_dir)
    except ConfigError as error:
        raise ConfigError(f"model.hf_dir ({hf_dir}): {error}") from None


def facts_of(fields: Any, *, source: str) -> ModelFacts:
    """Read and check the fields of config.json; `source` names it in errors. See `read_facts`."""
    architecture = _architecture(fields, source)
    _check_loading(fields, source)
    for name, reader in _READ_BY.items():
        if name not in architecture.fields and fields.get(name) not in (None, False):
            raise ConfigError(
                f"{source}: {name} ({json.dumps(fields[name])[:80]}) is no field of "
                f"{architecture.model_type} models, but {reader} would compute something else "
                "with it: remove it"
            )
    rules = {**_RULES, **architecture.fields}
    stated = _stated(fields, rules, source)
    for name, value in stated.items():
        _check(name, value, rules[name], architecture=architecture, source=source)
    rope = rope_of(fields, source=source)
    for name, reason in architecture.refused_fields.items():
        if fields.get(name, False) is not False:
            raise ConfigError(
                f"{source}: {name} is not supported for {architecture.model_type} models: {reason}"
            )
    layers = stated.pop("layer_types", None)
    facts = {**architecture.defaults, **stated, "layer_types": layers}
    if layers is not None and len(layers) != facts["num_hidden_layers"]:
        raise ConfigError(
            f"{source}: layer_types has {len(layers)} entries; it must have as many as "
            f"num_hidden_layers ({facts['num_hidden_layers']})"
        )
    _fill(facts, rope, architecture=architecture, source=source)
    facts["rope_parameters"] = rope.fields
    facts["quantization_config"] = fields.get("quantization_config")
    found = ModelFacts(model_type=architecture.model_type, **facts)
    try:
        rules_for(found)  # refuses settings that are not supported
    except ConfigError as error:
        raise ConfigError(f"{source}: {str(error).removeprefix('config.json: ')}") from None
    return found


def _architecture(fields: Any, source: str) -> Architecture:
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{source} names no model_type")
    found = architecture_of(SimpleNamespace(model_type=fields["model_type"]), source=source)
    named, wanted = fields.get("architectures") or [], found.hf_class
    if named != [wanted]:
        shown = ", ".join(map(str, named)) if isinstance(named, list) else repr(named)
        raise ConfigError(
            f"{source}: architectures ({shown or 'none'}) must be {wanted} for "
            f"model_type {found.model_type!r}"
        )
    return found


def _check_loading(fields: Mapping[str, Any], source: str) -> None:
    """Check fields that tell libraries how to load the model."""
    refuse_code(fields, source=source)
    for name in ("is_encoder_decoder", "add_cross_attention"):
        if (value := fields.get(name, False)) is not False:
            raise ConfigError(
                f"{source}: {name} ({json.dumps(value)[:80]}) must be false: models here are "
                "decoders alone"
            )
    if (value := fields.get("is_causal", True)) is not True:
        raise ConfigError(
            f"{source}: is_causal ({json.dumps(value)[:80]}) must be true: vLLM would attend to "
            "later tokens, too"
        )
    # vLLM reads them as other names of partial_rotary_factor and rope_theta, transformers does not.
    for name, neutral in (("rotary_pct", 1), ("rotary_emb_fraction", 1), ("rotary_emb_base", None)):
        if (value := fields.get(name)) not in (None, neutral):
            raise ConfigError(
                f"{source}: {name} ({json.dumps(value)[:80]}) is not read by transformers, but by "
                "vLLM: remove it"
            )
    # transformers would read another file than this one.
    if others := fields.get("configuration_files"):
        raise ConfigError(f"{source}: configuration_files ({others!a:.80}) are not read")
    for name in ("dtype", "torch_dtype"):  # the key's name before transformers 5
        if (value := fields.get(name)) is not None and value not in FLOATS:
            raise ConfigError(
                f"{source}: {name} ({json.dumps(value)[:80]}) must be one of {', '.join(FLOATS)}"
            )


def refuse_code(fields: Mapping[str, Any], *, source: str) -> None:
    """Raise ConfigError if a file of a model folder names Python code in the folder.

    Without running it, the libraries would use a class of their own, perhaps for another model or
    tokenizer.
    """
    if code := fields.get("auto_map"):
        raise ConfigError(
            f"{source}: auto_map ({code!a:.200}) names code in the folder, which is never run; if "
            "transformers supports the model without it, remove auto_map"
        )


def _stated(
    fields: Mapping[str, Any], rules: Mapping[str, FieldRule], source: str
) -> dict[str, Any]:
    """The values in config.json of the fields with rules, under one name each."""
    stated = {name: fields[name] for name in rules if name in fields}
    if "num_local_experts" in fields:  # transformers 5 writes it instead of num_experts
        other = fields["num_local_experts"]
        if stated.setdefault("num_experts", other) != other:
            raise ConfigError(
                f"{source}: num_experts is {stated['num_experts']!r}, but num_local_experts is "
                f"{other!r}"
            )
    return stated


def _check(
    name: str, value: Any, rule: FieldRule, *, architecture: Architecture, source: str
) -> None:
    words, holds = rule
    if value is None:
        # Null for a field that the architecture does not have is the same as missing.
        may_be_null = name in ("sliding_window", "layer_types", *architecture.nullable)
        if may_be_null or architecture.defaults.get(name) is None:
            return
    if value is None or not holds(value):
        raise ConfigError(f"{source}: {name} ({json.dumps(value)}) must be {words}")


def _fill(facts: dict[str, Any], rope: Rope, *, architecture: Architecture, source: str) -> None:
    """Set values that follow from others, as transformers does."""
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    if facts["num_key_value_heads"] is None:
        facts["num_key_value_heads"] = heads
    architecture.complete(facts)
    if not facts.get("head_dim") and hidden < heads:
        raise ConfigError(
            f"{source}: hidden_size ({hidden}) must be num_attention_heads ({heads}) or more"
        )
    head_dim = facts.get("head_dim") or hidden // heads
    if head_dim % 2:
        name = "head_dim" if facts.get("head_dim") else "hidden_size / num_attention_heads"
        raise ConfigError(
            f"{source}: {name} ({head_dim}) must be even: rotary positions rotate pairs"
        )
    if (rotated := rope.rotated(head_dim)) % 2 or not rotated:
        raise ConfigError(
            f"{source}: partial_rotary_factor ({rope.share}) of head_dim ({head_dim}) must be an "
            f"even number of elements, not {rotated}"
        )
