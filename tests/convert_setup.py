"""Small models of every architecture, of sizes that forgive nothing."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from gapo_megatron.models.rules import Rule, find_rule, split_all

# Three queries to a key; head_dim is not hidden / heads (8); the vocabulary is odd.
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 61,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CONFIG_CLASSES = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
}


def make_config(model_type: str, **changes: Any) -> PretrainedConfig:
    experts = EXPERTS if model_type == "qwen3_moe" else {}
    return CONFIG_CLASSES[model_type](**{**SIZES, **experts, "eos_token_id": 1, **changes})


def make_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases start alike: make every number count
        torch.nn.init.normal_(parameter)
    return model


def written_weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The tensors of the model folder that transformers writes: of experts one by one."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def to_hf(
    rules: Sequence[Rule], parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Whole Megatron parameters by name as Hugging Face tensors."""
    return split_all(rules, ((*find_rule(rules, name), full) for name, full in parameters))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [n for n in actual if not torch.equal(actual[n], expected[n])] == []
