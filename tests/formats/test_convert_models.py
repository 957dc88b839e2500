"""Real models from their configs alone: every tensor transformers expects, and no other."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from gapo_megatron.formats.config_check import check_config, compare_configs
from gapo_megatron.formats.megatron_args import to_args
from gapo_megatron.formats.weights import Entry
from gapo_megatron.models.published import shipped_fields
from gapo_megatron.models.rope import Rope
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import ARCHITECTURES, rope_of, rules_for

# As published in config.json, less what decides neither a shape nor what is computed.
QWEN2_5 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3 = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def sizes(*, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SMALL_QWEN = sizes(hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2)
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B": {
        **QWEN2_5,
        **SMALL_QWEN,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    **{
        name: shipped_fields(folder)
        for name, folder in {
            "Qwen2.5-7B": "Qwen2.5-7B",
            "Qwen2.5-32B": "Qwen2.5-32B",
            "Qwen2.5-72B": "Qwen2.5-72B",
            "DeepSeek-R1-Distill-Qwen-1.5B": "DeepSeek-R1-Distill-Qwen-1.5B",
            "Llama-3.2-3B": "Llama-3.2-3B-Instruct",
            "Llama-3.1-8B": "Llama-3.1-8B-Instruct",
            "Llama-3.1-70B": "Llama-3.1-70B-Instruct",
            "Qwen3-30B-A3B": "Qwen3-30B-A3B",
            "Phi-3-mini-4k": "Phi-3-mini-4k-instruct",
            "phi-4": "phi-4",
            "Seed-OSS-36B": "Seed-OSS-36B-Instruct",
            "Gemma-3-270M": "gemma-3-270m-it",
            "Gemma-3-1B": "gemma-3-1b-it",
            "OLMo-2-1B": "OLMo-2-0425-1B",
            "OLMo-2-7B": "OLMo-2-1124-7B",
            "GLM-4.5": "GLM-4.5",
            "GLM-4.5-Air": "GLM-4.5-Air",
            "DeepSeek-V3": "DeepSeek-V3",
            "Moonlight-16B-A3B": "Moonlight-16B-A3B",
        }.items()
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        **QWEN3,
        **sizes(hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8),
    },
}
# As the model cards count them: a tied output layer not twice.
NUM_PARAMETERS = {
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "Seed-OSS-36B": 36_151_104_512,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "OLMo-2-1B": 1_484_916_736,
    "OLMo-2-7B": 7_298_617_344,
    # Without the layer that predicts further tokens.
    "GLM-4.5": 352_797_829_024,
    "GLM-4.5-Air": 106_852_251_264,
    "DeepSeek-V3": 671_026_419_200,
    "Moonlight-16B-A3B": 15_960_110_208,
}
ROPES = {
    "DeepSeek-R1-Distill-Qwen-1.5B": Rope(10_000.0, "default", {}),
    "Llama-3.2-3B": Rope(500_000.0, "llama3", {"factor": 32.0, **LLAMA3_SCALING}),
    "Llama-3.1-8B": Rope(500_000.0, "llama3", {"factor": 8.0, **LLAMA3_SCALING}),
    "Llama-3.1-70B": Rope(500_000.0, "llama3", {"factor": 8.0, **LLAMA3_SCALING}),
    "Phi-3-mini-4k": Rope(10_000.0, "default", {}),
    "phi-4": Rope(250_000.0, "default", {}),
    "Seed-OSS-36B": Rope(10_000_000.0, "default", {}),
    "Gemma-3-270M": Rope(1_000_000.0, "default", {}, windowed_base=10_000.0),
    "Gemma-3-1B": Rope(1_000_000.0, "default", {}, windowed_base=10_000.0),
    "OLMo-2-1B": Rope(500_000.0, "default", {}),
    "OLMo-2-7B": Rope(500_000.0, "default", {}),
    "GLM-4.5": Rope(1_000_000.0, "default", {}, share=0.5),
    "GLM-4.5-Air": Rope(1_000_000.0, "default", {}, share=0.5),
    "DeepSeek-V3": Rope(
        10_000.0,
        "yarn",
        {
            **{"factor": 40, "original_max_position_embeddings": 4096, "truncate": True},
            **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "Moonlight-16B-A3B": Rope(50_000.0, "default", {}),
}


@pytest.fixture(scope="module", params=CONFIGS)
def real(request, tmp_path_factory) -> SimpleNamespace:
    """A model's folder with config.json alone, its config, its table, what transformers expects."""
    fields = CONFIGS[request.param]
    fields = {"architectures": [ARCHITECTURES[fields["model_type"]].hf_class], **fields}
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        expected = written_shapes(AutoModelForCausalLM.from_config(config))
    rules = rules_for(config)
    return SimpleNamespace(
        name=request.param, folder=folder, config=config, rules=rules, expected=expected
    )


def written_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """What transformers writes of a model: of experts one by one, of tied tensors one."""
    buffers = {name: one for name, one in model.named_buffers() if name in model.state_dict()}
    written = revert_weight_conversion(model, dict(model.named_parameters()) | buffers)
    return {name: tuple(tensor.shape) for name, tensor in written.items()}


def test_table_is_what_transformers_expects(real):
    shapes = hf_shapes(real.rules)
    assert shapes == real.expected
    assert sum(map(math.prod, shapes.values())) == NUM_PARAMETERS[real.name]


def test_config_is_taken_as_it_is(real):
    entries = {
        name: Entry(shape, torch.bfloat16, "model.safetensors")
        for name, shape in real.expected.items()
    }
    config = check_config(real.folder, entries)
    rope = rope_of(config.to_dict())
    assert rope == ROPES.get(real.name, Rope(1_000_000.0, "default", {}))
    # Megatron-LM's arguments state the same model.
    compare_configs(config, to_args(config))
