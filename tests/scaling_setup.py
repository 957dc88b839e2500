"""Tiny models and configs for the planner's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from gapo_megatron.config import Config, parse_config
from gapo_megatron.convert.tables import ARCHITECTURES

# Sizes that are no multiples of 64: parameters and buckets are padded.
TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 56,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TINY_EXPERTS: dict[str, Any] = TINY | {
    "model_type": "qwen3_moe",
    "head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def write_model(folder: Path, fields: dict[str, Any]) -> str:
    """A folder with config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"architectures": [ARCHITECTURES[fields["model_type"]]], **fields}
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def read_model(folder: Path, fields: dict[str, Any]) -> Any:
    return AutoConfig.from_pretrained(write_model(folder, fields))


def make_config(hf_dir: str, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"output_dir": "unused", "num_steps": 1},
        "model": {"hf_dir": hf_dir},
        "data": {"train_path": "/nowhere.jsonl", "max_prompt_tokens": 32},
        "batch": {"max_tokens_per_microbatch": 256},
        "rollout": {"max_response_tokens": 96},
        "reward": {"kind": "exact"},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return parse_config(tree, source="test")


def parallel_of(tp: int, pp: int, ep: int = 1, *, cp: int = 1, sp: bool = False) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "sequence_parallel": sp,
    }
