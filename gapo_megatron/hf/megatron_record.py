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
from gapo_megatron.hf.manifest import (
    MANIFEST_NAME,
    Manifest,
    is_plain_name,
    list_steps,
    read_manifest,
)
from gapo_megatron.hf.unpickle import read_common, read_metadata
from gapo_megatron.io.documents import read_json, read_object, read_text
from gapo_megatron.models.rope import read_rope
from gapo_megatron.models.tables import geometry_of

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
}
# Arguments that change what a model computes but neither names nor shapes, with the only value that
# is supported; None: not used.
_FIXED = {
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,  # norms stored less 1
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "no_rope_freq": None,
    "window_size": None,
    "softmax_type": "vanilla",
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
}
_PLAIN = (bool, int, float, str, list, tuple, type(None))
# rope_type "llama3": megatron-core fixes these, and only the factor is an argument.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in a Megatron folder, and what it records of its model."""

    root: Path
    """The folder with `.metadata`."""
    hf_dir: Path | None
    """Hugging Face folder of its model, perhaps without weights; None if unknown."""
    records: dict[Path, dict[str, Any]]
    """By file: what it records of the model, under the names of config.json."""
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

    Parallel sizes are 1, because nothing in the folder depends on them. A rope scaling that
    arguments cannot express is left out.
    """
    # Arguments with a field of their own in config.json, and those that follow from its sizes.
    g = geometry_of(hf_config)
    rope = read_rope(hf_config.to_dict())
    args = {name: getattr(hf_config, field, None) for name, field in _ARGS.items()}
    args |= {
        "kv_channels": g.head_dim,
        "ffn_hidden_size": g.intermediate,
        "group_query_attention": g.kv_heads != g.heads,
        "num_query_groups": g.kv_heads,
        "untie_embeddings_and_output_weights": not g.tied,
        "max_position_embeddings": hf_config.max_position_embeddings,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "add_qkv_bias": g.qkv_bias,
        "qk_layernorm": g.head_norms,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        **_FIXED,
    }
    if g.num_experts:
        args["moe_router_pre_softmax"] = not hf_config.norm_topk_prob
    # Megatron-LM has one kind of scaling, in which only the factor can be set.
    factor = rope.scaling.get("factor", 1.0)
    if rope.kind == "default" or rope.scaling == {"factor": factor, **_LLAMA3}:
        args |= {
            "rotary_base": rope.base,
            "use_rope_scaling": rope.kind == "llama3",
            "rope_scaling_factor": factor,
        }
    return argparse.Namespace(**args)


def from_args(
    args: Mapping[str, Any], *, source: str = "Megatron-LM's arguments"
) -> dict[str, Any]:
    """Convert Megatron-LM's arguments to fields of config.json, as far as they state them.

    Raises:
        ConversionError: the arguments describe a model that is not supported.
    """
    # Values of other types come from a program that is not Megatron-LM.
    for name in (*_ARGS, *_FIXED):
        if not isinstance(args.get(name), _PLAIN):
            raise ConversionError(f"{source}: {name} is no plain value: {reprlib.repr(args[name])}")
    for name, value in _FIXED.items():
        if args.get(name) is not None and args[name] != value:
            raise ConversionError(
                f"{source}: {name} ({args[name]!r}) is not supported: must be {value!r}"
            )
    record = {field: args[name] for name, field in _ARGS.items() if args.get(name) is not None}
    if args.get("num_experts") is None:
        record["intermediate_size"] = args.get("ffn_hidden_size")
    elif args.get("moe_router_pre_softmax") is not None:
        record["norm_topk_prob"] = not args["moe_router_pre_softmax"]
    grouped = args.get("group_query_attention")
    if grouped is not None:
        groups = args.get("num_query_groups") if grouped else args.get("num_attention_heads")
        record["num_key_value_heads"] = groups
    # Arguments that mean the opposite of a field, or only something together.
    untied = args.get("untie_embeddings_and_output_weights")
    if untied is not None:
        record["tie_word_embeddings"] = not untied
    kind = args.get("position_embedding_type")
    if kind is not None and args.get("rotary_base") is not None:
        record["rope_theta"] = args["rotary_base"]
        if kind != "rope":
            record["rope_scaling"] = {"rope_type": kind}
        elif args.get("use_rope_scaling"):
            factor = args.get("rope_scaling_factor")
            record["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return {field: value for field, value in record.items() if value is not None}


def _read_manifest(root: Path) -> Manifest | None:
    if not os.path.lexists(root / MANIFEST_NAME):
        return None
    try:
        return read_manifest(root)
    except CheckpointError as error:
        raise ConversionError(str(error)) from None
