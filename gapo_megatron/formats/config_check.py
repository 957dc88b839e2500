"""Compare a model's config with its weights and with what a Megatron folder records.

A wrong size would fail later with a puzzling shape error, and a wrong rope base or norm epsilon
would only give a bad model. Both are reported here, before a tensor is read.
"""

from __future__ import annotations

import argparse
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from gapo_megatron.compat.library_errors import as_config_error
from gapo_megatron.errors import ConversionError
from gapo_megatron.formats import megatron_args
from gapo_megatron.formats.megatron_record import Record
from gapo_megatron.formats.model_folder import check_dtypes, check_sizes
from gapo_megatron.formats.weights import Entry
from gapo_megatron.models.config_json import read_facts
from gapo_megatron.models.parts import layer_types, periodic_layer_types
from gapo_megatron.models.tables import architecture_of, geometry_of, rules_for


def read_config(root: Path) -> PretrainedConfig:
    """Read config.json of a folder with transformers, if its architecture is supported.

    Raises:
        ConfigError: see `config_json.read_facts`, which a dry run and a plan use; or transformers
            cannot use it.
    """
    read_facts(root)
    with as_config_error(f"{root / 'config.json'} is not a usable config"):
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(root, trust_remote_code=False)
    if (path := root / "generation_config.json").exists():  # vLLM would fail on it after minutes
        with as_config_error(f"{path} is not usable"):
            GenerationConfig.from_pretrained(root, trust_remote_code=False)
    rules_for(hf_config)
    return hf_config


def check_config(root: Path, entries: Mapping[str, Entry]) -> PretrainedConfig:
    """Read config.json and check that it agrees with the weights.

    Args:
        root: folder of config.json.
        entries: shape, dtype and file of every tensor of the folder.

    Raises:
        ConfigError: see `read_config`.
        ConversionError: it contradicts the weights, see `model_folder.check_sizes`.
    """
    hf_config = read_config(root)
    check_dtypes(root, entries)
    check_sizes(root, hf_config, entries)
    return hf_config


def compare_configs(
    hf_config: PretrainedConfig, record: Record, *, source: str = "the Megatron folder"
) -> None:
    """Refuse a Megatron folder that records another model than config.json describes.

    Args:
        hf_config: config of the Hugging Face side.
        record: what the folder records of its model. Missing and null fields of config.json are not
            compared. Rope is compared if any of its fields is there: as in config.json, a base
            without a scaling means no scaling.
        source: where the record is from, for errors.

    Raises:
        ConfigError: the record's rope cannot be used, see `read_rope`.
        ConversionError: lists every field that differs, with both values.
    """
    if isinstance(record, argparse.Namespace):
        found = megatron_args.differences(hf_config, record)
    else:
        found = _differences(hf_config, record, source)
    if found:
        told = (
            f"{name} is {_shown(there)} there and {_shown(here)} here"
            for name, there, here in found
        )
        raise ConversionError(
            f"{source} records another model than config.json describes: {'; '.join(told)}"
        )


# --- two configs ---------------------------------------------------------------------------------


def _differences(
    hf_config: PretrainedConfig, record: Mapping[str, Any], source: str
) -> list[tuple[Any, ...]]:
    """Fields that differ, with their values there and here."""
    names = architecture_of(hf_config).model_fields
    ours = {name: getattr(hf_config, name, None) for name in names}
    geometry = geometry_of(hf_config)
    # Of latent attention transformers calls the rotated part head_dim.
    ours |= {"head_dim": geometry.rotary_dim, "num_key_value_heads": geometry.kv_heads}
    if geometry.windowed:
        ours["layer_types"] = layer_types(geometry.windowed)
        record = _with_layer_types(record, geometry.num_layers)
    pairs = {n: (record[n], ours[n]) for n in ours if record.get(n) is not None}
    fields = hf_config.to_dict()
    if "sliding_window" in record:
        pairs["sliding_window"] = (_window(record), _window(fields))
    if any(record.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters")):
        read = architecture_of(hf_config).read_rope
        theirs, own = read(record, source=source).fields, read(fields).fields
        pairs |= {name: (theirs.get(name), own.get(name)) for name in {**theirs, **own}}
    # A missing switch is off.
    return [
        (n, there, here) for n, (there, here) in pairs.items() if (there or None) != (here or None)
    ]


def _window(fields: Mapping[str, Any]) -> int | None:
    """The sliding window; Qwen states one even if it is switched off."""
    window: int | None = fields.get("sliding_window")
    return window if fields.get("use_sliding_window", True) else None


def _with_layer_types(record: Mapping[str, Any], num_layers: int) -> Mapping[str, Any]:
    """The record with layer_types also where it states their period instead."""
    period = record.get("sliding_window_pattern")
    if record.get("layer_types") is not None or type(period) is not int or period < 1:
        return record
    return {**record, "layer_types": periodic_layer_types(period, num_layers)}


def _shown(value: Any) -> str:
    return "not stated" if value is None else reprlib.repr(value)
