"""Find the checkpoint in a Megatron folder, and what the folder records of its model.

- Our conversion: OUT/release/, named by OUT/latest_checkpointed_iteration.txt; model in OUT/hf/.
- Our runs: RUN/checkpoints/step_00000040/; model in its manifest.json.
- Megatron-LM: DIR/iter_0000100/, named by the same text file; model in common.pt's `args`.
"""

from __future__ import annotations

import argparse
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import Metadata
from transformers import PretrainedConfig

from gapo_megatron.errors import CheckpointError, ConfigError, ConversionError
from gapo_megatron.formats.manifest import (
    MANIFEST_NAME,
    Manifest,
    is_plain_name,
    list_steps,
    read_manifest,
)
from gapo_megatron.formats.megatron_rope import ROPE_ARGS, rope_args, rope_fields
from gapo_megatron.formats.unpickle import read_common, read_metadata
from gapo_megatron.io.documents import read_json, read_object, read_text
from gapo_megatron.models.parts import SCORES, layer_types, periodic_layer_types
from gapo_megatron.models.tables import architecture_of, geometry_of, rope_of

TRACKER = "latest_checkpointed_iteration.txt"

# Megatron-LM's arguments and the fields of config.json with the same meaning.
_ARGS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_score_function": "scoring_func",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
_LATENT_ARGS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_OF_ROUTER = ("scoring_func", "routed_scaling_factor", "n_group", "topk_group")
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
_CLAMP = "activation_func_clamp_value"
# Arguments that `from_args` turns into other fields, or checks against each other.
_READ = (
    *("window_size", "window_attn_skip_freq", "moe_layer_freq"),
    *("softmax_type", _CLAMP, *_GATES[True]),
)
_PLAIN = (bool, int, float, str, list, tuple, type(None))


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in a Megatron folder, and what it records of its model."""

    root: Path
    """The folder with `.metadata`."""
    hf_dir: Path | None
    """Hugging Face folder of its model, perhaps without weights; None if unknown."""
    records: dict[Path, dict[str, Any]]
    """What each file records of the model, under the names of config.json."""
    metadata: Metadata
    """The `.metadata` that describes its tensors."""
    manifest: Manifest | None
    """Digests of every file; None unless a run of ours wrote the checkpoint."""


def find_megatron(path: str | Path) -> Found:
    """Find the checkpoint in a folder; reads no tensor.

    Args:
        path: a checkpoint, a folder with latest_checkpointed_iteration.txt, or a run of ours (its
            newest checkpoint).

    Raises:
        ConfigError: there is no complete checkpoint of the format torch_dist.
        ConversionError: .metadata, common.pt or a JSON file is damaged, or would run code.
    """
    root = _find(Path(path))
    try:
        backend = read_json(root / "metadata.json", error=ConversionError)["sharded_backend"]
    except FileNotFoundError:
        raise ConfigError(
            f"Megatron folder {root} is incomplete: metadata.json, written last, is missing"
        ) from None
    except (KeyError, TypeError):
        raise ConfigError(f"{root / 'metadata.json'} is not megatron-core's") from None
    if backend != "torch_dist":
        raise ConfigError(f"Megatron folder {root} has the format {backend!r}, not 'torch_dist'")
    if not (root / ".metadata").exists():
        raise ConfigError(f"Megatron folder {root} is incomplete: .metadata is missing")
    manifest, metadata = _read_manifest(root), read_metadata(root)
    records = _read_records(root, metadata, manifest)
    return Found(root, _hf_dir_of(root, manifest), records, metadata, manifest)


def _find(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"Megatron folder {path} does not exist")
    if (path / ".metadata").exists() or (path / "metadata.json").exists():
        return path
    if (path / TRACKER).exists():
        name = read_text(path / TRACKER, max_bytes=256).strip()
        name = f"iter_{int(name):07d}" if name.isdecimal() else name
        if not is_plain_name(name) or not (path / name).is_dir():
            raise ConfigError(f"{path / TRACKER} names the folder {name!r}, which does not exist")
        return path / name
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    try:
        steps = list_steps(folder)
    except CheckpointError as error:
        raise ConversionError(str(error)) from None
    if steps:
        return steps[0]
    raise ConfigError(
        f"Megatron folder {path} holds no checkpoint: no .metadata, no {TRACKER}, no step_*"
    )


def _hf_dir_of(root: Path, manifest: Manifest | None) -> Path | None:
    beside = root.parent / "hf"
    if (beside / "config.json").is_file():
        return beside
    named = ((manifest and manifest.config.get("model")) or {}).get("hf_dir")
    is_there = isinstance(named, str) and os.path.isfile(os.path.join(named, "config.json"))
    return Path(named) if named and is_there else None


def _read_records(
    root: Path, metadata: Metadata, manifest: Manifest | None
) -> dict[Path, dict[str, Any]]:
    common, beside = root / "common.pt", root.parent / "hf" / "config.json"
    args = read_common(root, metadata).get("args")
    records = {
        common: from_args(vars(args), source=str(common))
        if isinstance(args, argparse.Namespace)
        else {},
        root / MANIFEST_NAME: dict(manifest.model) if manifest else {},
        beside: read_object(beside, error=ConversionError) if beside.exists() else {},
    }
    return {path: record for path, record in records.items() if record}


def to_args(hf_config: PretrainedConfig) -> argparse.Namespace:
    """Megatron-LM's arguments that describe the model, for its `--use-checkpoint-args`.

    Parallel sizes are 1, because nothing in the folder depends on them. Rotary settings that
    arguments cannot express are left out (`megatron_rope.rope_args`).
    """
    # Arguments with a field of their own in config.json, and those that follow from its sizes.
    g = geometry_of(hf_config)
    rope = rope_of(hf_config.to_dict())
    args = {name: getattr(hf_config, field, None) for name, field in _ARGS.items()}
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
        "moe_ffn_hidden_size": g.expert_intermediate or None,
        "qk_layernorm": g.head_norms or g.latent is not None,
        "multi_latent_attention": g.latent is not None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    if g.latent:
        args |= {name: getattr(hf_config, field) for name, field in _LATENT_ARGS.items()}
    if g.num_experts:
        args |= {
            "num_experts": g.num_experts,
            "moe_layer_freq": [int(has) for has in g.has_experts] if g.num_dense else 1,
            "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
            "moe_router_score_function": SCORES[g.sigmoid_router],
            "moe_router_enable_expert_bias": g.sigmoid_router,
            "moe_shared_expert_intermediate_size": g.shared_intermediate or None,
        }
    # Megatron-LM's own arguments do not build the others.
    args |= _FIXED if architecture_of(hf_config).megatron_layers else {}
    if architecture_of(hf_config).megatron_layers:
        args |= {**_GATES[g.gate_limit > 0], _CLAMP: g.gate_limit or None}
    args |= rope_args(rope, is_latent=g.latent is not None)
    return argparse.Namespace(**args)


def from_args(
    args: Mapping[str, Any], *, source: str = "Megatron-LM's arguments"
) -> dict[str, Any]:
    """Convert Megatron-LM's arguments to fields of config.json, as far as they state them.

    Raises:
        ConversionError: the arguments describe a model that is not supported.
    """
    # Values of other types come from a program that is not Megatron-LM.
    for name in (*_ARGS, *_FIXED, *_READ, *_LATENT_ARGS, *ROPE_ARGS):
        if not isinstance(args.get(name), _PLAIN):
            raise ConversionError(f"{source}: {name} is no plain value: {reprlib.repr(args[name])}")
    for name, value in _FIXED.items():
        if args.get(name) is not None and args[name] != value:
            raise ConversionError(
                f"{source}: {name} ({args[name]!r}) is not supported: must be {value!r}"
            )
    if args.get("softmax_type") not in (None, "vanilla", "learnable"):
        raise ConversionError(
            f"{source}: softmax_type ({args['softmax_type']!r}) is not supported: must be "
            "'vanilla' or 'learnable'"
        )
    record = {field: args[name] for name, field in _ARGS.items() if args.get(name) is not None}
    if args.get("num_experts") is None:
        record["intermediate_size"] = args.get("ffn_hidden_size")
        record = {name: value for name, value in record.items() if name not in _OF_ROUTER}
    else:
        record |= _router(args, source)
    grouped = args.get("group_query_attention")
    if args.get("multi_latent_attention"):  # without the sizes of other attention
        record.pop("head_dim", None)
        record |= {field: args.get(name) for name, field in _LATENT_ARGS.items()}
    elif grouped is not None:
        groups = args.get("num_query_groups") if grouped else args.get("num_attention_heads")
        record["num_key_value_heads"] = groups
    record |= _windows(args, source) | _gate(args, source)
    # Arguments that mean the opposite of a field, or only something together.
    untied = args.get("untie_embeddings_and_output_weights")
    if untied is not None:
        record["tie_word_embeddings"] = not untied
    record |= {"softmax_type": args.get("softmax_type"), **rope_fields(args)}
    return {field: value for field, value in record.items() if value is not None}


def _router(args: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of config.json about experts, where an argument stands for a default or several."""
    record: dict[str, Any] = {}
    if args.get("moe_router_score_function", "softmax") == "softmax":
        if args.get("moe_router_pre_softmax") is not None:
            record["norm_topk_prob"] = not args["moe_router_pre_softmax"]
    elif not args.get("moe_router_enable_expert_bias", True):
        raise ConversionError(
            f"{source}: moe_router_enable_expert_bias (False) is not supported: must be True for "
            f"moe_router_score_function ({args['moe_router_score_function']!r})"
        )
    for name, default in (
        ("moe_router_topk_scaling_factor", 1.0),
        ("moe_router_num_groups", 1),
        ("moe_router_group_topk", 1),
    ):
        if name in args:  # null, or 0
            record[_ARGS[name]] = args[name] or default
    if "moe_layer_freq" in args:
        match args["moe_layer_freq"]:
            case 1:
                record["first_k_dense_replace"] = 0
            case list(flags) if flags == sorted(flags) and {*flags} <= {0, 1}:
                record["first_k_dense_replace"] = flags.count(0)
            case other:
                raise ConversionError(
                    f"{source}: moe_layer_freq ({other!a:.200}) is not supported: must be 1, or a "
                    "list of 0 for the first layers and 1 for the others"
                )
    return record


def _gate(args: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The field swiglu_limit, 0 if the gated activation is the usual one."""
    stated = {name: args[name] for name in _GATES[True] if args.get(name) is not None}
    if not stated and args.get(_CLAMP) is None:
        return {}
    limit = args.get(_CLAMP) or 0
    for name, value in stated.items():
        if value != _GATES[bool(limit)][name]:
            raise ConversionError(
                f"{source}: {name} ({value!r}) is not supported beside {_CLAMP} "
                f"({args.get(_CLAMP)!r}): must be {_GATES[bool(limit)][name]!r}"
            )
    return {"swiglu_limit": limit}


def _windows(args: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of config.json about windows of attention; sliding_window is 0 if none is computed."""
    if "window_size" not in args:
        return {}
    match args["window_size"]:
        case None:
            return {"sliding_window": 0}
        case [int(left), 0] if left >= 0:
            fields: dict[str, Any] = {"sliding_window": left + 1}
        case size:
            raise ConversionError(
                f"{source}: window_size ({size!r}) is not supported: must be (N, 0)"
            )
    num_layers = args.get("num_layers")
    if "window_attn_skip_freq" not in args or not isinstance(num_layers, int):
        return fields
    match args["window_attn_skip_freq"]:
        case None:
            kinds = layer_types([True] * num_layers)
        case int(period) if period > 0:
            kinds = periodic_layer_types(period, num_layers)
        case list(flags) if len(flags) == num_layers and all(flag in (0, 1) for flag in flags):
            kinds = layer_types(map(bool, flags))
        case other:
            raise ConversionError(
                f"{source}: window_attn_skip_freq ({other!a:.200}) must be a whole number of 1 or "
                f"more, or a list of 0 and 1 for each of {num_layers} layers"
            )
    return fields | {"layer_types": kinds}


def _read_manifest(root: Path) -> Manifest | None:
    if not os.path.lexists(root / MANIFEST_NAME):
        return None
    try:
        return read_manifest(root)
    except CheckpointError as error:
        raise ConversionError(str(error)) from None
