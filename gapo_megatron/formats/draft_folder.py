"""Check the folder of an EAGLE-3 draft before it is used. Imports no torch and no vllm."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gapo_megatron.config import RolloutConfig
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.headers import find_files
from gapo_megatron.io.documents import read_object
from gapo_megatron.models.config_json import refuse_code
from gapo_megatron.models.cpu_engine import CPU_HEAD_DIMS, is_cpu_build
from gapo_megatron.models.tables import architecture_of


def check_draft(rollout: RolloutConfig, hf_config: Any) -> None:
    """Refuse a draft that vLLM cannot load beside the model; does nothing without `eagle3`.

    That the draft was trained for this model no file says. For another one it is rarely accepted,
    which costs time; samples stay those of the model.

    Args:
        rollout: section `rollout`.
        hf_config: the model's config, as for `check_shapes`.

    Raises:
        ConfigError: names `rollout.draft_hf_dir`, the file and the value.
    """
    if rollout.draft != "eagle3":
        return
    if not architecture_of(hf_config).gives_hidden_states:
        raise ConfigError(
            f"rollout.draft ('eagle3') must not be set with {hf_config.model_type} models: vLLM's "
            "give a draft no hidden states"
        )
    folder = Path(rollout.draft_hf_dir)
    try:
        tensors = find_files(folder)
        fields = read_object(folder / "config.json")
        refuse_code(fields, source=str(folder / "config.json"))
        problem = _problem(fields, hf_config, rollout.tensor_parallel_size)
        problem = problem or _lost_output_layer(fields, tensors)
    except (ConfigError, ConversionError) as error:
        raise ConfigError(f"rollout.draft_hf_dir ({folder}): {error}") from None
    if problem:
        raise ConfigError(f"rollout.draft_hf_dir ({folder}): config.json: {problem}")


def describe_draft(rollout: RolloutConfig) -> str:
    """What a run's draft proposes and takes, for people; empty without one."""
    if rollout.draft == "none":
        return ""
    text = f"{rollout.draft}, at most {rollout.draft_tokens} per sequence and decoding step"
    if rollout.draft == "eagle3":
        folder = Path(rollout.draft_hf_dir)
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        size = f"{num_bytes / 2**20:,.1f} MiB of" if num_bytes else "unknown: there are no"
        text += f"; {size} weights, which predicted memory leaves out"
    return f"{text}; how many are accepted, and so the speed, cannot be predicted"


def _problem(fields: dict[str, Any], hf_config: Any, tp_size: int) -> str:
    """What of config.json vLLM cannot load; empty if it can."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not any("Eagle3" in str(name) for name in names):
        return f"architectures ({ascii(names)[:80]}) must name an Eagle3 model"
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    for name in sizes:
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{name} ({ascii(value)[:80]}) must be a whole number above 0"
    vocab, hidden, heads, kv_heads = (fields[name] for name in sizes)
    if vocab != hf_config.vocab_size:
        return f"vocab_size ({vocab}) must be the model's, {hf_config.vocab_size}"
    width = fields.get("target_hidden_size") or hidden
    if width != hf_config.hidden_size:
        name = "target_hidden_size" if fields.get("target_hidden_size") else "hidden_size"
        return f"{name} ({ascii(width)[:80]}) must be the model's, {hf_config.hidden_size}"
    proposed = fields.get("draft_vocab_size", vocab)
    if proposed is not None and not (isinstance(proposed, int) and 0 < proposed <= vocab):
        return f"draft_vocab_size ({ascii(proposed)[:80]}) must be 1 to vocab_size ({vocab})"
    if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        return (
            f"num_attention_heads ({heads}) and num_key_value_heads ({kv_heads}) do not divide "
            f"over rollout.tensor_parallel_size ({tp_size})"
        )
    head_dim = fields.get("head_dim") or hidden // heads
    if is_cpu_build() and head_dim not in CPU_HEAD_DIMS:
        return (
            f"head_dim ({ascii(head_dim)[:80]}) must be one of "
            f"{', '.join(map(str, CPU_HEAD_DIMS))} for vLLM on a CPU"
        )
    return ""


def _lost_output_layer(fields: dict[str, Any], tensors: Iterable[str]) -> str:
    """A draft without an output layer gets the model's in vLLM, whose rows are other tokens'."""
    proposed, vocab = fields.get("draft_vocab_size"), fields["vocab_size"]
    if proposed in (None, vocab) or any("lm_head" in name for name in tensors):
        return ""
    return (
        f"draft_vocab_size ({proposed}) is below vocab_size ({vocab}), so the weights must have an "
        "output layer of their own, lm_head.weight"
    )
