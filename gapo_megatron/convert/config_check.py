"""A model's config against its weights, and against what a Megatron folder says of itself.

A config that is wrong in a way that changes shapes would end in a puzzling shape error of some
tensor; one that is wrong in a way that does not (rope base, norm epsilon) would end in nothing but
a bad model. Both are named here, before a tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from gapo_megatron.convert.config_json import read_facts
from gapo_megatron.convert.hf import Entry
from gapo_megatron.convert.rope import read_rope
from gapo_megatron.convert.tables import Geometry, rules_for
from gapo_megatron.errors import ConfigError, ConversionError

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# What decides the shapes of the weights and what the model computes with them, beside rope.
_MODEL_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "hidden_act",
    "layer_types",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_local_experts",  # the same in config.json of transformers 5
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def read_config(root: Path) -> PretrainedConfig:
    """Read config.json of a folder as transformers does, provided a table covers its model.

    Raises:
        ConfigError: see `config_json.read_facts`, which a dry run and a plan go by; or transformers
            cannot use it.
    """
    read_facts(root)
    try:
        hf_config = AutoConfig.from_pretrained(root)
    except (StrictDataclassError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{root / 'config.json'} is not a usable config: {error}") from None
    rules_for(hf_config)
    return hf_config


def check_config(root: Path, entries: Mapping[str, Entry]) -> PretrainedConfig:
    """Read config.json, provided it says what the weights say.

    A size is taken from the weights where all its tensors agree (every layer's, every expert's): a
    single odd one is a damaged tensor, which the conversion table names, and not a wrong config.

    Args:
        root: folder of config.json.
        entries: shape, dtype and file of every tensor of the folder.

    Returns:
        The config as transformers reads it.

    Raises:
        ConfigError: see `read_config`.
        ConversionError: it contradicts the weights; lists field, value, tensor and what that says.
    """
    hf_config = read_config(root)
    check_dtypes(root, entries)
    differences = [*_depth(hf_config, entries), *_sizes(hf_config, entries)]
    differences += _tying(hf_config, entries)
    if differences:
        raise ConversionError(
            f"{root / 'config.json'} contradicts the weights: {'; '.join(differences)}"
        )
    return hf_config


def check_dtypes(root: Path, entries: Mapping[str, Entry]) -> None:
    """Raise ConversionError unless every tensor of a folder, of either format, is of floats."""
    for name, entry in entries.items():
        if entry.dtype not in _FLOATS:
            raise ConversionError(
                f"{root / entry.file}: {name} is {entry.dtype}; quantized weights are not supported"
            )


def compare_configs(
    hf_config: PretrainedConfig, record: Mapping[str, Any], *, source: str = "the Megatron folder"
) -> None:
    """Refuse a Megatron folder that says it holds another model than config.json describes.

    Args:
        hf_config: of the Hugging Face side.
        record: what the folder states of its model, by names of config.json's fields. What is
            absent or null is not stated. Rope is, as soon as one of its fields is there: as in
            config.json, a base without a scaling means that there is none.
        source: of the record, for errors.

    Raises:
        ConfigError: the record's rope cannot be used, see `read_rope`.
        ConversionError: lists every field that differs, with both values.
    """
    ours = {name: getattr(hf_config, name, None) for name in _MODEL_FIELDS}
    geometry = Geometry.of(hf_config)
    ours |= {"head_dim": geometry.head_dim, "num_key_value_heads": geometry.kv_heads}
    pairs = {n: (record[n], ours[n]) for n in _MODEL_FIELDS if record.get(n) is not None}
    fields = hf_config.to_dict()
    if "sliding_window" in record:
        pairs["sliding_window"] = (_window(record), _window(fields))
    if any(record.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters")):
        theirs, own = _flat_rope(record, source=source), _flat_rope(fields)
        pairs |= {name: (theirs.get(name), own.get(name)) for name in {**theirs, **own}}
    differences = [
        f"{name} is {_shown(there)} there and {_shown(here)} here"
        for name, (there, here) in pairs.items()
        if (there or None) != (here or None)  # an architecture without a switch has it off
    ]
    if differences:
        raise ConversionError(
            f"{source} states another model than config.json describes: {'; '.join(differences)}"
        )


# --- config.json and the weights -----------------------------------------------------------------


def _depth(hf_config: PretrainedConfig, entries: Mapping[str, Entry]) -> Iterator[str]:
    """num_hidden_layers against the highest layer that has a tensor."""
    numbers = {
        int(found[1]): name
        for name in entries
        if (found := re.match(r"model\.layers\.(\d+)\.", name))
    }
    last = max(numbers, default=-1)
    if numbers and last + 1 != hf_config.num_hidden_layers:
        yield (
            f"num_hidden_layers is {hf_config.num_hidden_layers}, but the last of the layers is "
            f"number {last} ({numbers[last]} in {entries[numbers[last]].file})"
        )


def _sizes(hf_config: PretrainedConfig, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Sizes of the config against the first dimensions of the weights that show them."""
    groups: dict[str, list[str]] = {}
    for name in entries:
        groups.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    g = Geometry.of(hf_config)
    layer, attention = "model.layers.*", "model.layers.*.self_attn"
    heads = f"num_attention_heads ({g.heads}) x head_dim ({g.head_dim})"
    kv_heads = f"num_key_value_heads ({g.kv_heads}) x head_dim ({g.head_dim})"
    experts: int = getattr(hf_config, "num_experts", 0)
    expert_size: int = getattr(hf_config, "moe_intermediate_size", 0)
    for field, value, pattern in (
        ("vocab_size", g.vocab, "model.embed_tokens.weight"),
        ("hidden_size", g.hidden, f"{layer}.input_layernorm.weight"),
        ("head_dim", g.head_dim, f"{attention}.q_norm.weight"),
        (heads, g.heads * g.head_dim, f"{attention}.q_proj.weight"),
        (kv_heads, g.kv_heads * g.head_dim, f"{attention}.k_proj.weight"),
        ("intermediate_size", g.intermediate, f"{layer}.mlp.gate_proj.weight"),
        ("num_experts", experts, f"{layer}.mlp.gate.weight"),
        ("moe_intermediate_size", expert_size, f"{layer}.mlp.experts.*.gate_proj.weight"),
    ):
        names = groups.get(pattern, [])
        sizes = {entries[name].shape[:1] for name in names}
        if len(sizes) == 1 and sizes != {(value,)}:
            entry = entries[names[0]]
            yield (
                f"{field} is {value}, but {names[0]} in {entry.file} has shape {list(entry.shape)}"
            )


def _tying(hf_config: PretrainedConfig, entries: Mapping[str, Entry]) -> Iterator[str]:
    """tie_word_embeddings against the output layer that is there, or not."""
    embedding, output = entries.get("model.embed_tokens.weight"), entries.get("lm_head.weight")
    if not hf_config.tie_word_embeddings and output is None:
        yield "tie_word_embeddings is false, but there is no lm_head.weight"
    if not (hf_config.tie_word_embeddings and embedding and output):
        return
    if (output.shape, output.dtype) != (embedding.shape, embedding.dtype):
        yield (
            f"tie_word_embeddings is true, but lm_head.weight in {output.file} is "
            f"{list(output.shape)} {output.dtype}, model.embed_tokens.weight "
            f"{list(embedding.shape)} {embedding.dtype}"
        )


# --- two configs ---------------------------------------------------------------------------------


def _flat_rope(fields: Mapping[str, Any], source: str = "config.json") -> dict[str, Any]:
    rope = read_rope(fields, source=source)
    return {"rope_theta": rope.base, "rope_type": rope.kind, **rope.scaling}


def _window(fields: Mapping[str, Any]) -> int | None:
    """How far attention sees; Qwen states a window even where it is switched off."""
    window: int | None = fields.get("sliding_window")
    return window if fields.get("use_sliding_window", True) else None


def _shown(value: Any) -> str:
    return "not stated" if value is None else repr(value)
