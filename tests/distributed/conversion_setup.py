"""Small random models of every architecture, with distinct sizes so that mistakes show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto import CONFIG_MAPPING

from gapo_megatron.formats.torch_dist import write_megatron
from gapo_megatron.formats.weights import HfFolder
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
# Defaults that are no tokens of this vocabulary; and transformers has no gradient for an embedding
# of padding, which is a token like others here.
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
# An MLP of 56 in the first layer; eight experts of 24 in four groups, of which two are chosen; a
# shared expert of 72.
_SIGMOID_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 3,
    "routed_scaling_factor": 1.5,
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
    # A window that most sequences here exceed; 12 of 16 elements are rotated.
    "phi3": {
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
        **_NO_TOKENS,
    },
    "seed_oss": {"attention_bias": True, **_NO_TOKENS},
    "olmo2": _NO_TOKENS,
    # The third of four layers sees all keys.
    "gemma3_text": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **_NO_TOKENS,
    },
    "glm4_moe": {
        **_SIGMOID_EXPERTS,
        "attention_bias": True,
        "use_qk_norm": True,
        **_NO_TOKENS,
    },
    # Sequences reach all frequency bands; activations the clamp.
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 6.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        **_NO_TOKENS,
    },
    # Queries and keys of 10 + 6 elements, values of 14; YaRN over 32 positions.
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "head_dim": 6,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        **_SIGMOID_EXPERTS,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
        },
        **_NO_TOKENS,
    },
}
ARCHITECTURES = tuple(_MODELS)
MOONLIGHT: dict[str, Any] = {
    **{"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
"""Changes of deepseek_v3: queries straight from the hidden state, no YaRN, one group of experts."""


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
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # sigmoids differ by as much
                buffer.copy_(0.3 * torch.randn_like(buffer))
                buffer[0] = -0.0  # adding nothing would change its bits
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
