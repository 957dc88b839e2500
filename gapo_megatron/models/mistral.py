"""Mistral: like Llama. The sliding window of older models is refused."""

from __future__ import annotations

from typing import Any

from gapo_megatron.models import llama
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.parts import refuse_set


def _check(config: Any) -> None:
    refuse_set(config, "attention_bias", "mlp_bias")


MISTRAL = Architecture(
    model_type="mistral",
    hf_class="MistralForCausalLM",
    defaults=llama.DEFAULTS
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    refused_fields=llama.VLLM_BIASES
    | {"layer_types": "transformers treats models that have it as ministral"},
    complete=llama.complete,
    check=_check,
)
