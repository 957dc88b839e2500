"""Qwen2 and Qwen2.5 (DeepSeek-R1-Distill-Qwen too): biases on query, key and value only."""

from __future__ import annotations

from typing import Any

from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
"""Defaults of Qwen2's config.json; also Qwen3's, except for those that it sets itself."""


def complete(facts: dict[str, Any]) -> None:
    """Ignore the window that Qwen's config.json states even if it is switched off."""
    if not facts["use_sliding_window"]:
        facts["sliding_window"] = None


QWEN2 = Architecture(
    model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    published={
        "Qwen2.5-7B": "Qwen/Qwen2.5-7B",
        "Qwen2.5-32B": "Qwen/Qwen2.5-32B",
        "Qwen2.5-72B": "Qwen/Qwen2.5-72B",
        "Qwen2.5-Math-1.5B": "Qwen/Qwen2.5-Math-1.5B",
        "DeepSeek-R1-Distill-Qwen-1.5B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        # Also the model of the miniature study (`gapo_tools.demonstration.demo_task`).
        "warm_start": "make demo",
        "warm_start_tools": "make demo CONFIG=configs/demo_tools.toml",
    },
    defaults=DEFAULTS,
    nullable=("num_key_value_heads",),
    complete=complete,
    geometry=lambda config: Geometry.of(config, qkv_bias=True),
)
