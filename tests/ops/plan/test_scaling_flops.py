"""Operations and weights of the model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from gapo_megatron.ops.plan.flops import (
    Shape,
    engine_bytes,
    forward_flops,
    kv_cache_bytes,
    step_flops,
)
from gapo_megatron.ops.plan.workload import Workload
from tests.hf.test_convert_models import CONFIGS, NUM_PARAMETERS
from tests.scaling_setup import H200, config, hf

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


def test_only_scored_positions_reach_the_head():
    both = {"num_tokens": 100, "mean_squared_length": 0, "num_sequences": 1}
    some = forward_flops(hf("Qwen2.5-7B"), **both, num_scored=60)
    assert some.head == 0.6 * forward_flops(hf("Qwen2.5-7B"), **both).head


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_published_models(name):
    shape = Shape.of(hf(name))
    assert shape.num_parameters == NUM_PARAMETERS[name]
    # What is left out: biases, norms, and the embedding or the tied head.
    products = shape.common_weights
    products += shape.num_sparse * shape.num_experts * shape.expert_weights
    tables = (1 if CONFIGS[name]["tie_word_embeddings"] else 2) * shape.head_weights
    assert products + tables == pytest.approx(shape.num_parameters, rel=1e-3)


@pytest.mark.parametrize(("tp", "width"), [(1, 768), (2, 384), (4, 256), (8, 128)])
def test_an_expert_of_a_quantised_engine_is_filled_up_to_whole_blocks(tp, width):
    """Qwen3-30B-A3B by hand: the 768 of an expert are 192 on four ranks, and vLLM makes 256."""
    shape, quantized = Shape.of(hf("Qwen3-30B-A3B")), config(rollout={"quantization": "fp8"})
    attention, experts = 2 * 2048 * (32 + 4) * 128, 128 * 3 * 2048 * width
    layers = 48 * (attention / tp + experts)
    others = shape.num_parameters - 48 * (attention + 128 * 3 * 2048 * 768)
    assert others == pytest.approx(2 * 151936 * 2048 + 48 * 128 * 2048, rel=1e-3)  # and norms
    found = engine_bytes(shape, quantized, H200, rollout_tp_size=tp)
    assert found == pytest.approx(layers + 2 * others / tp, rel=1e-12)
    assert engine_bytes(shape, config(), H200, rollout_tp_size=tp) == 2 * shape.num_parameters / tp


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_an_engines_room_for_factors_is_beside_its_weights(tp):
    """Qwen2.5-7B by hand, rank 33 in 64: A for each part, and on eight ranks a KV head for each."""
    shape = Shape.of(hf("Qwen2.5-7B"))
    lora = {"kind": "lora", "rank": 33}
    kv = 512 // min(tp, 4)
    qkv, proj = 3 * 3584 + 3584 // tp + 2 * kv, 3584 // tp + 3584
    fc1, fc2 = 2 * 3584 + 2 * 18944 // tp, 18944 // tp + 3584
    for targets, width in ((["qkv", "proj", "fc1", "fc2"], qkv + proj + fc1 + fc2), (["fc2"], fc2)):
        run = config(adapter=lora | {"targets": targets})
        room = 2 * 28 * 64 * width
        full = engine_bytes(shape, config(), H200, rollout_tp_size=tp)
        assert engine_bytes(shape, run, H200, rollout_tp_size=tp) == full + room
        found = [kv_cache_bytes(shape, one, H200, rollout_tp_size=tp) for one in (config(), run)]
        assert found[0] - found[1] == pytest.approx(room)
    merged = config(adapter=lora, model={"precision": "fp32"})  # on a GPU
    assert engine_bytes(shape, merged, H200, rollout_tp_size=tp) == 2 * full


def test_active_parameters_of_experts():
    """Qwen3-30B-A3B: 3.3 billion active, embedding included, by its model card."""
    shape = Shape.of(hf("Qwen3-30B-A3B"))
    active = shape.active_weights + 2 * shape.head_weights
    assert active == pytest.approx(3.3e9, rel=0.02)
    # Four projections, two norms of heads, two of the layer, the router, three of every expert.
    assert shape.num_tensors == 48 * (9 + 3 * 128) + 3


# Every response reaches the limit, so lengths are what they seem: 100 + 400 tokens.
FIXED = Workload(100, 400, 400)
BATCH = {"rollout_prompts": 64, "minibatch_prompts": 16}


def test_operations_of_a_step_are_those_of_its_tokens():
    """Generation meets each once, an update thrice; two responses share their prompt's pass."""
    shape = Shape.of(hf("Qwen2.5-7B"))
    pairs = config(batch=BATCH | {"rollouts_per_prompt": 2})
    found = step_flops(shape, pairs, FIXED)
    # 28 layers; queries and outputs 3,584 wide, keys and values 512, an MLP of 18,944.
    layers = 2 * 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    attention, head = 2 * 28 * 3584, 2 * 152064 * 3584
    forward = 64_000 * layers + 128 * 500**2 * attention + 51_200 * head
    assert forward == pytest.approx(8.97467e14, rel=1e-5)
    assert found.update == pytest.approx(3 * forward, rel=1e-3)
    assert found.old_log_probs == pytest.approx(0.75 * forward, rel=1e-3)
    assert found.total == found.generation + found.old_log_probs + found.update
    # Each prompt once less; of it one position is scored.
    shared = 6_400 * layers + 64 * 100**2 * attention - 64 * head
    assert found.generation == pytest.approx(forward - shared, rel=1e-3)
    assert found.generation == pytest.approx(8.13885e14, rel=1e-3)


def test_what_is_left_out_or_computed_again_is_no_model_operation():
    shape = Shape.of(hf("Qwen2.5-7B"))
    whole = step_flops(shape, config(batch=BATCH), FIXED)
    again = config(batch=BATCH, model={"recompute": "full"})
    assert step_flops(shape, again, FIXED) == whole
    half = Workload(100, 400, 400, active_share=0.5)
    found = step_flops(shape, config(batch=BATCH), half)
    assert found.generation == whole.generation
    assert found.update == pytest.approx(whole.update / 2)
    assert found.old_log_probs == pytest.approx(whole.old_log_probs / 2)
    # A KL term needs every row, and the initial model's log-probs of all of them.
    kl = step_flops(shape, config(batch=BATCH, objective={"kl_coef": 0.01}), half)
    assert kl.update == whole.update
    assert kl.old_log_probs == pytest.approx(whole.old_log_probs / 0.75 * 1.75)
    clipped = step_flops(shape, config(batch=BATCH), Workload(100, 400, 400, clipped_share=1.0))
    head = 2 * 64 * 8 * 400 * shape.head_weights
    assert clipped.update == pytest.approx(whole.update - 2 * head)


def test_frozen_weights_have_no_gradient_and_factors_have():
    shape, workload = Shape.of(hf("Qwen2.5-7B")), Workload(100, 400, 400)
    whole = step_flops(shape, config(batch=BATCH), workload)
    adapter = {"kind": "lora", "rank": 8, "targets": ("qkv", "fc2")}
    found = step_flops(shape, config(batch=BATCH, adapter=adapter), workload)
    tokens, scored = 64 * 8 * 500, 64 * 8 * 400
    frozen = 2 * tokens * 28 * shape.layer_weights + 2 * scored * shape.head_weights
    # Of queries, keys and values one A; of 3,584 columns and 4,608 rows, and 18,944 and 3,584.
    factors = 2 * tokens * 28 * 8 * (3584 + 4608 + 18944 + 3584)
    assert found.generation == whole.generation
    assert found.update == pytest.approx(whole.update - frozen + 3 * factors)
    assert found.old_log_probs == pytest.approx(whole.old_log_probs + 0.75 * factors)


def test_replaced_groups_are_generated_but_not_trained_on():
    shape = Shape.of(hf("Qwen2.5-7B"))
    half = Workload(100, 400, 400, active_share=0.5)
    once = step_flops(shape, config(batch=BATCH), half)
    twice = step_flops(shape, config(batch=BATCH | {"dynamic_sampling_rounds": 1}), half)
    assert twice.generation == pytest.approx(1.5 * once.generation)
    assert twice.update == pytest.approx(1.5 * once.update)  # three quarters are active, not half
    # As many as were drawn, where that is known: 1.6 times as many, not 1.5.
    config_twice = config(batch=BATCH | {"dynamic_sampling_rounds": 1})
    drawn = step_flops(shape, config_twice, half, num_prompts=1.6 * 64)
    assert drawn.generation == pytest.approx(1.6 * once.generation)
    assert (drawn.update, drawn.old_log_probs) == (twice.update, twice.old_log_probs)
