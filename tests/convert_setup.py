"""Small models of every architecture, of sizes that forgive nothing."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
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
    "phi3": Phi3Config,
    "seed_oss": SeedOssConfig,
    "olmo2": Olmo2Config,
    "gemma3_text": Gemma3TextConfig,
    "glm4_moe": Glm4MoeConfig,
    "gpt_oss": GptOssConfig,
    "deepseek_v3": DeepseekV3Config,
}
# The first layer has an MLP, the others six experts in two groups.
_SIGMOID_EXPERTS = {
    "n_routed_experts": 6,
    "n_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
_EXPERTS = {
    "qwen3_moe": EXPERTS,
    # Half of a head is an even number of elements.
    "glm4_moe": _SIGMOID_EXPERTS | {"attention_bias": True, "use_qk_norm": True, "head_dim": 12},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _SIGMOID_EXPERTS
    | {
        **{"num_key_value_heads": 6, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8},
        **{"q_lora_rank": 14, "kv_lora_rank": 22, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8},
        **{"v_head_dim": 6, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    },
}
# Defaults that are no tokens of so small a vocabulary.
_NO_TOKENS = {"phi3": {"pad_token_id": None, "bos_token_id": None}}


def make_config(model_type: str, **changes: Any) -> PretrainedConfig:
    own = {**_EXPERTS.get(model_type, {}), **_NO_TOKENS.get(model_type, {})}
    usual = {**SIZES, **own, "eos_token_id": 1}
    return CONFIG_CLASSES[model_type](**{**usual, **changes})


def make_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases start alike: make every number count
        torch.nn.init.normal_(parameter)
    return model


def one_by_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file as this package names them: experts stacked in it by their number."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stack = re.fullmatch(r"(.*\.mlp\.experts)\.(\w+_proj(?:_bias)?)", name)
        if stack is None:
            found[name] = tensor
            continue
        found |= {f"{stack[1]}.{expert}.{stack[2]}": one for expert, one in enumerate(tensor)}
    return found


def pack_experts(folder: Path) -> None:
    """Make a folder of gpt-oss as published ones are: random experts in MXFP4, the rest in bf16."""
    generator, path = torch.Generator().manual_seed(0), folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        shape = (experts, columns, rows // 32)
        # Most numbers are between 0.01 and 1.
        for part, low, high, more in (("blocks", 0, 256, (16,)), ("scales", 120, 124, ())):
            tensors[f"{name}_{part}"] = torch.randint(
                low, high, (*shape, *more), dtype=torch.uint8, generator=generator
            )
    _write_quantized(folder, tensors, {"quant_method": "mxfp4"})


def pack_linears(folder: Path, block: tuple[int, int]) -> None:
    """Make a folder as DeepSeek-V3's is: linear layers in FP8, biases of experts in fp32, the rest
    in bf16. Numbers and scales are random, and so is a layer behind the last."""
    generator, path = torch.Generator().manual_seed(0), folder / "model.safetensors"
    tensors = load_file(path)
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    name = "self_attn.o_proj.weight"
    tensors[f"model.layers.{last + 1}.{name}"] = tensors[f"model.layers.{last}.{name}"].clone()
    for name, tensor in list(tensors.items()):
        if not name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.bfloat16()
        if name.endswith(("_proj.weight", "_with_mqa.weight")):
            # As large as before, up to 448 times a scale.
            scales = [-(-size // of) for size, of in zip(tensor.shape, block, strict=True)]
            tensors[f"{name}_scale_inv"] = torch.rand(scales, generator=generator) * 1e-3 + 1e-3
            tensors[name] = (tensor * 500).to(torch.float8_e4m3fn)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    _write_quantized(folder, tensors, quantization | {"weight_block_size": block})


def _write_quantized(
    folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]
) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    del fields["dtype"]
    fields["quantization_config"] = quantization | {"modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(fields))


def written_weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The tensors of the model folder that transformers writes: of experts one by one."""
    model.save_pretrained(folder)
    return one_by_one(load_file(folder / "model.safetensors"))


def to_hf(
    rules: Sequence[Rule], parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Whole Megatron parameters by name as Hugging Face tensors."""
    return split_all(rules, ((*find_rule(rules, name), full) for name, full in parameters))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [n for n in actual if not torch.equal(actual[n], expected[n])] == []
