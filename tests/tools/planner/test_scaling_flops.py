"""Operations and weights of the model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from gapo_megatron.models.published import find_model
from gapo_tools.planner.flops import Shape, forward_flops
from tests.formats.test_convert_models import CONFIGS, NUM_PARAMETERS
from tests.scaling_setup import hf

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "phi3": {"pad_token_id": None},
    "seed_oss": {"head_dim": 16},
    "olmo2": {},
    "glm4_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 3,
    },
    # Windows longer than the sequences.
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    },
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "v_head_dim": 14},
        **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"n_group": 1, "topk_group": 1, "n_shared_experts": 3},
    },
}


@pytest.mark.parametrize("model_type", MODELS)
def test_flops_are_those_torch_counts(model_type):
    """Torch counts both halves of causal attention: of its attention we have a half."""
    hf_config = AutoConfig.for_model(model_type, **{**TINY, **MODELS[model_type]})
    # As single products: torch counts no grouped ones.
    hf_config._attn_implementation = hf_config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(hf_config).eval()
    length, count = 16, 2
    tokens = torch.zeros(count, length, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens)
    flops = forward_flops(
        hf_config, num_tokens=count * length, mean_squared_length=length**2, num_sequences=count
    )
    assert flops.layers + flops.head + 2 * flops.attention == counter.get_total_flops()
    assert flops.head == 2 * count * length * 97 * 32
    half = forward_flops(
        hf_config,
        num_tokens=count * length,
        mean_squared_length=length**2,
        num_sequences=count,
        num_scored=count * length / 2,
    )
    assert (half.head, half.layers) == (flops.head / 2, flops.layers)


def test_a_window_has_fewer_pairs():
    """Ten tokens, three keys each: 1 + 2 + 8 x 3 pairs, half a pair less for each query's own."""
    whole, narrow, wide = (
        forward_flops(
            AutoConfig.for_model("phi3", **TINY, pad_token_id=None, sliding_window=window),
            num_tokens=10,
            mean_squared_length=100,
            num_sequences=1,
        )
        for window in (None, 3, 10)
    )
    assert wide == whole
    assert narrow.layers == whole.layers
    assert narrow.attention == pytest.approx(whole.attention * (27 - 1.5) / (55 - 5))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_published_models(name):
    shape = Shape.of(hf(name))
    assert shape.num_parameters == NUM_PARAMETERS[name]
    for shipped in (name, f"{name}-Instruct"):
        if (model := find_model(f"/nowhere/{shipped}")[0]) is not None:
            assert Shape.of(model).num_parameters == NUM_PARAMETERS[name]
    # What is left out: biases, norms, and the embedding or the tied head.
    products = shape.common_weights
    products += shape.num_sparse * shape.num_experts * shape.expert_weights
    tables = (1 if CONFIGS[name]["tie_word_embeddings"] else 2) * shape.head_weights
    assert products + tables == pytest.approx(shape.num_parameters, rel=1e-3)


def test_active_parameters_of_experts():
    """Qwen3-30B-A3B: 3.3 billion active, embedding included, by its model card."""
    shape = Shape.of(hf("Qwen3-30B-A3B"))
    active = shape.active_weights + 2 * shape.head_weights
    assert active == pytest.approx(3.3e9, rel=0.02)
    # Four projections, two norms of heads, two of the layer, the router, three of every expert.
    assert shape.num_tensors == 48 * (9 + 3 * 128) + 3
