"""Small random models of every architecture, with distinct sizes so that mistakes show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto import CONFIG_MAPPING

from gapo_megatron.hf.torch_dist import write_megatron
from gapo_megatron.hf.weights import HfFolder
from gapo_megatron.models.rules import Place, Rule
from gapo_megatron.models.tables import rules_for

VOCAB_SIZE = 61
"""Odd: every tensor parallel size pads it, and 4 pads it differently from 2."""

# The original context is short, so that sequences here reach all three frequency bands.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
    "mistral": {"sliding_window": None},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
ARCHITECTURES = tuple(_MODELS)


def hf_config(name: str, **changes: Any) -> PretrainedConfig:
    """Six query heads on two key/value heads of 16, in 48 hidden units: all sizes differ."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return CONFIG_MAPPING[name](**(sizes | _MODELS[name] | changes))


def save_model(folder: Path, name: str, **changes: Any) -> None:
    """Write a random model in which every weight matters; see `hf_config`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases differ from each other; attention is far from uniform.
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
    model.save_pretrained(folder)


def convert(hf_dir: Path, folder: Path) -> None:
    """Write a model's weights as a Megatron folder, without Megatron-core."""
    source = HfFolder(hf_dir)
    config = AutoConfig.from_pretrained(hf_dir)
    rules = rules_for(config)

    def read(rule: Rule, place: Place) -> Tensor:
        return rule.merge([source.read(name) for name in rule.hf_names(place)], place)

    folder.mkdir()
    dtypes = {rule.megatron: torch.float32 for rule in rules}
    write_megatron(read, rules, hf_config=config, dtypes=dtypes, output_dir=folder)
