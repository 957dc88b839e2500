"""Llama 3, 3.1 and 3.2: no biases; 3.1 and 3.2 scale rotary frequencies (`rope`, "llama3")."""

from __future__ import annotations

from typing import Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.parts import refuse_set

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Defaults of Llama's config.json; also Mistral's, except for those that it sets itself."""

VLLM_BIASES = dict.fromkeys(
    ("bias", "qkv_bias"), "vLLM would add biases, which transformers' class does not have"
)
"""Fields that only vLLM's Llama reads, which also runs other architectures -> why refused."""


def complete(facts: dict[str, Any]) -> None:
    """Heads share the hidden size unless head_dim is given."""
    if facts["head_dim"] is None:
        facts["head_dim"] = facts["hidden_size"] // facts["num_attention_heads"]


def _check(config: Any) -> None:
    refuse_set(config, "attention_bias", "mlp_bias")
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:  # transformers refuses it even if head_dim is given
        raise ConfigError(
            f"config.json: num_attention_heads ({heads}) must divide hidden_size ({hidden})"
        )


LLAMA = Architecture(
    model_type="llama",
    hf_class="LlamaForCausalLM",
    published={
        name: f"meta-llama/{name}"
        for name in ("Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct", "Llama-3.2-3B-Instruct")
    }
    | {"SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"},
    defaults=DEFAULTS | {"attention_bias": False, "mlp_bias": False},
    refused_fields=VLLM_BIASES,
    complete=complete,
    check=_check,
)
