"""Seed-OSS: like Llama, with biases on query, key and value if config.json says so."""

from __future__ import annotations

from functools import partial
from typing import Any

from gapo_megatron.models import llama, parts
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.parts import refuse_set


def _check(config: Any) -> None:
    refuse_set(config, "attention_out_bias", "mlp_bias")


SEED_OSS = Architecture(
    model_type="seed_oss",
    hf_class="SeedOssForCausalLM",
    published={"Seed-OSS-36B-Instruct": "ByteDance-Seed/Seed-OSS-36B-Instruct"},
    defaults={
        "vocab_size": 155136,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    fields={"attention_out_bias": ("true or false", lambda value: isinstance(value, bool))},
    nullable=("num_key_value_heads", "head_dim"),
    complete=llama.complete,
    geometry=lambda config: Geometry.of(config, qkv_bias=config.attention_bias),
    check=_check,
    check_computed=partial(parts.check_computed, biases=("attention_bias",)),
)
