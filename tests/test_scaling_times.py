"""Operations and bytes of the model, and the seconds made of them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from gapo_megatron.config import parse_config
from gapo_megatron.errors import ConfigError
from gapo_megatron.scaling.arithmetic import Shape, forward_flops
from gapo_megatron.scaling.efficiency import Efficiency
from gapo_megatron.scaling.generation import Decoding, generation_s
from gapo_megatron.scaling.hardware import GPUS, find_gpu
from gapo_megatron.scaling.layout import Layout
from gapo_megatron.scaling.times import Training, reward_s, step_time, sync_s
from gapo_megatron.scaling.workload import DEFAULT_SPREAD, Workload, spread_of
from tests.test_convert_models import CONFIGS, NUM_PARAMETERS

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
}
WORKLOAD = Workload(
    mean_prompt_tokens=100, mean_response_tokens=700, longest_response_tokens=3092, active_share=0.7
)
# Everything as the data sheet says, and no call costs anything.
IDEAL = Efficiency(
    matmul=1,
    bandwidth=1,
    communication=1,
    **dict.fromkeys(
        (
            *("layer_s", "collective_s", "update_s", "decode_step_s"),
            *("decode_sequence_s", "verdict_s", "tensor_s"),
        ),
        1e-15,
    ),
)


def hf(name: str):
    fields = dict(CONFIGS[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def config(**sections):
    tree = {
        "run": {"output_dir": "runs/x", "num_steps": 10},
        "model": {"hf_dir": "models/x"},
        "data": {"train_path": "data.jsonl", "max_prompt_tokens": 1000},
        "rollout": {"max_response_tokens": 3092},
        "reward": {"kind": "math"},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return parse_config(tree, source="test")


def layout(*, tp=1, pp=1, cp=1, dp=8, ep=1, sp=None, recompute="none", rollout_tp=1):
    return Layout(
        tp_size=tp,
        pp_size=pp,
        cp_size=cp,
        dp_size=dp,
        ep_size=ep,
        sequence_parallel=tp > 1 if sp is None else sp,
        recompute=recompute,
        rollout_tp_size=rollout_tp,
    )


def training(model="Qwen2.5-7B", *, gpu="h200", workload=WORKLOAD, efficiency=IDEAL, **kwargs):
    sections = kwargs.pop("sections", {})
    return Training(
        Shape.of(hf(model)), config(**sections), layout(**kwargs), workload, GPUS[gpu], efficiency
    )


# --- operations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODELS)
def test_flops_are_those_torch_counts(model_type):
    """Torch counts both halves of causal attention: of its attention we have a half."""
    hf_config = AutoConfig.for_model(model_type, **TINY, **MODELS[model_type])
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


def test_only_scored_positions_reach_the_head():
    both = {"num_tokens": 100, "mean_squared_length": 0, "num_sequences": 1}
    some = forward_flops(hf("Qwen2.5-7B"), **both, num_scored=60)
    assert some.head == 0.6 * forward_flops(hf("Qwen2.5-7B"), **both).head


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_published_models(name):
    shape = Shape.of(hf(name))
    assert shape.num_parameters == NUM_PARAMETERS[name]
    # What is left out: biases, norms, and the embedding or the tied head.
    products = shape.num_layers * (shape.layer_weights + shape.num_experts * shape.expert_weights)
    tables = (1 if CONFIGS[name]["tie_word_embeddings"] else 2) * shape.head_weights
    assert products + tables == pytest.approx(shape.num_parameters, rel=1e-3)


def test_active_parameters_of_experts():
    """Qwen3-30B-A3B: 3.3 billion active, embedding included, by its model card."""
    shape = Shape.of(hf("Qwen3-30B-A3B"))
    active = shape.num_layers * shape.active_layer_weights + 2 * shape.head_weights
    assert active == pytest.approx(3.3e9, rel=0.02)
    # Four projections, two norms of heads, two of the layer, the router, three of every expert.
    assert shape.num_tensors == 48 * (9 + 3 * 128) + 3


def test_weights_per_rank_make_up_the_model():
    shape = Shape.of(hf("Qwen3-30B-A3B"))
    others, experts = shape.weights_per_rank(tp_size=4, pp_size=1, ep_size=8)
    assert 8 * experts == 48 * 128 * 3 * 2048 * 768
    assert 4 * others + 8 * experts == pytest.approx(shape.num_parameters, rel=1e-3)


# --- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.3, 0.7, 1.5])
def test_lengths_have_the_mean_they_were_given(spread):
    workload = dataclasses.replace(WORKLOAD, spread=spread)
    lengths, survival = workload.survival()
    step = 3092 / len(lengths)
    assert survival.sum() * step == pytest.approx(700, rel=0.01)
    rng = np.random.default_rng(0)
    draws = np.exp(rng.normal(size=200_000) * spread)
    scale = bisect(lambda s: np.minimum(s * draws, 3092).mean() - 700)
    drawn = np.minimum(scale * draws, 3092)
    assert workload.mean_squared_response == pytest.approx((drawn**2).mean(), rel=0.02)
    assert np.interp(1000, lengths, survival) == pytest.approx((drawn > 1000).mean(), abs=0.01)


def bisect(function, low=1.0, high=1e5):
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return low


def test_spread_comes_back_from_the_truncated_share():
    workload = dataclasses.replace(WORKLOAD, spread=1.1)
    _, survival = workload.survival()
    found = spread_of(mean=700, longest=3092, truncated_share=float(survival[-1]))
    assert found == pytest.approx(1.1, rel=0.02)
    assert spread_of(mean=700, longest=3092, truncated_share=0.0) == DEFAULT_SPREAD


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mean_response_tokens": 4000}, r"mean response tokens \(4000\)"),
        ({"active_share": 1.2}, r"active_share \(1.2\) must be from 0 to 1"),
        ({"spread": 0.0}, "spread"),
    ],
)
def test_wrong_workloads_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(WORKLOAD, **changes)


def test_wrong_efficiencies_and_devices_are_refused():
    with pytest.raises(ConfigError, match=r"matmul \(1.5\) must be above 0 and at most 1"):
        Efficiency(matmul=1.5)
    with pytest.raises(ConfigError, match=r"layer_s \(0\) must be above 0"):
        Efficiency(layer_s=0)
    with pytest.raises(ConfigError, match="'h300' is not one of h100, h200, h20, cpu"):
        find_gpu("h300")


# --- generation ----------------------------------------------------------------------------------


def decoding(model="Qwen2.5-7B", *, tp=1, efficiency=IDEAL):
    gpu = GPUS["h200"]
    return Decoding(Shape.of(hf(model)), tp, 2, gpu.bf16_flops, gpu, efficiency)


def test_one_sequence_waits_for_the_weights():
    """7.07 billion weights meet a token (no embedding): 14.1 GB at 4.8 TB/s are 2.9 ms."""
    step = decoding().step_s(np.array([1.0]), np.array([0.0]))[0]
    weights = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944) + 152064 * 3584
    assert step == pytest.approx(2 * weights / 4.8e12, rel=1e-9)


def test_many_sequences_wait_for_products_or_for_their_keys():
    step = decoding()
    many = step.step_s(np.array([100_000.0]), np.array([0.0]))[0]
    assert many == pytest.approx(1e5 * 2 * 7.070e9 / 989e12, rel=0.01)
    long = step.step_s(np.array([64.0]), np.array([20_000.0]))[0]
    keys = 64 * 20_000 * 28 * 2 * 512 * 2  # 28 layers, K and V of 4 heads x 128, 2 bytes
    assert long == pytest.approx((keys + 14.14e9) / 4.8e12, rel=0.01)


def test_experts_are_read_as_far_as_tokens_meet_them():
    step = decoding("Qwen3-30B-A3B")
    one, many = step.step_s(np.array([1.0, 2000.0]), np.zeros(2))
    expert = 48 * 3 * 2048 * 768 * 2 / 4.8e12  # seconds of one expert in every layer
    assert (many - one) > 110 * expert
    shape = step.shape
    others = (shape.num_layers * shape.layer_weights + shape.head_weights) * 2 / 4.8e12
    assert one == pytest.approx(others + 8 * expert, rel=1e-9)


def seconds(workload=WORKLOAD, *, kv_gib=60.0, world=8, tp=1, model="Qwen2.5-7B", **batch):
    return generation_s(
        Shape.of(hf(model)),
        config(batch=batch),
        rollout_tp_size=tp,
        world_size=world,
        workload=workload,
        gpu=GPUS["h200"],
        efficiency=IDEAL,
        kv_cache_bytes=kv_gib * 2**30,
    )


def test_the_longest_response_holds_the_batch():
    """A simulation of one replica, step by step, among eight: the mean over many draws."""
    rng = np.random.default_rng(0)
    step = decoding()
    draws = np.exp(rng.normal(size=200_000) * WORKLOAD.spread)
    scale = bisect(lambda s: np.minimum(s * draws, 3092).mean() - 700)
    simulated = []
    for _ in range(20):
        drawn = scale * np.exp(rng.normal(size=(8, 256)) * WORKLOAD.spread)
        drawn = np.minimum(drawn, 3092)
        replica = drawn[drawn.max(1).argmax()]
        times = np.arange(0, drawn.max(), 8)
        running = np.array([(replica > t).sum() for t in times], dtype=float)
        simulated.append(8 * step.step_s(np.maximum(running, 1), 100 + times).sum())
    assert seconds() == pytest.approx(np.mean(simulated), rel=0.05)


def test_equal_lengths_have_no_tail():
    narrow = dataclasses.replace(WORKLOAD, spread=0.02)
    assert seconds(narrow) < 0.5 * seconds()


def test_a_small_cache_makes_sequences_wait():
    assert seconds(kv_gib=2.0) > 1.15 * seconds()
    # vLLM starts with room for 1,000 + 3,092 + 1 tokens, however short the prompts are.
    shape = Shape.of(hf("Qwen2.5-7B"))
    needed = (1000 + 3092 + 1) * shape.kv_bytes_per_token(element_bytes=2) / 2**30
    assert seconds(kv_gib=0.999 * needed) == math.inf
    assert seconds(kv_gib=1.001 * needed) < math.inf


def test_with_a_small_cache_the_throughput_is_that_of_what_it_holds():
    """Far more sequences than slots: the tail is nothing beside the queue."""
    many = seconds(kv_gib=4.0, rollout_prompts=4096, world=1)
    shape = Shape.of(hf("Qwen2.5-7B"))
    aged = WORKLOAD.mean_squared_response / (2 * 700)
    slots = 4 * 2**30 / shape.kv_bytes_per_token(element_bytes=2) / (100 + aged)
    one = decoding().step_s(np.array([slots]), np.array([100 + aged]))[0]
    assert many == pytest.approx(4096 * 8 * 700 / slots * one, rel=0.05)


def test_more_gpus_do_not_shorten_the_tail():
    assert seconds(world=64) > 0.5 * seconds(world=8)
    assert seconds(world=64) < seconds(world=8)


# --- training ------------------------------------------------------------------------------------


def test_update_is_three_forward_passes_and_a_head_of_four():
    one = training()
    tokens = 64 * 8 * 0.7 / 8 * 800
    forward = 2 * tokens * (7.07e9 - 152064 * 3584) / 989e12
    head = 2 * tokens * 7 / 8 * 152064 * 3584 / 989e12
    # Attention adds a few percent, adding up gradients too.
    assert one.num_tokens == pytest.approx(tokens)
    assert one.pass_s(backward=False) == pytest.approx(forward + head, rel=0.05)
    assert one.pass_s(backward=True) == pytest.approx(3 * forward + 4 * head, rel=0.06)


def test_clipped_rows_skip_the_backward_pass_of_the_head_alone():
    clipped = training(workload=dataclasses.replace(WORKLOAD, clipped_share=1.0))
    free = training()
    assert clipped.head_s(backward=True) == free.head_s(backward=True) / 4
    assert clipped.head_s(backward=False) == free.head_s(backward=False)
    assert clipped.stage_s(backward=True) == free.stage_s(backward=True)


def test_rows_without_advantage_cost_nothing_unless_a_term_needs_them():
    every = training(workload=dataclasses.replace(WORKLOAD, active_share=1.0))
    some = training()
    assert some.num_tokens == pytest.approx(0.7 * every.num_tokens)
    with_kl = training(sections={"objective": {"kl_coef": 0.01}})
    assert with_kl.num_tokens == every.num_tokens
    # Three of four mini-batches, and with a KL term all four at the initial weights.
    assert some.old_log_probs_s() == 3 * some.pass_s(backward=False)
    assert with_kl.old_log_probs_s() == 7 * with_kl.pass_s(backward=False)


def test_recomputation_adds_a_forward_pass():
    none, selective, full = (training(recompute=r) for r in ("none", "selective", "full"))
    flops = none._flops()
    rate = 989e12
    assert full.stage_s(backward=True) - none.stage_s(backward=True) == pytest.approx(
        (flops.layers + flops.attention) / rate
    )
    assert selective.stage_s(backward=True) - none.stage_s(backward=True) == pytest.approx(
        flops.attention / rate
    )


def test_pipeline_bubble():
    """Equal stages: (m + p - 1) / m of the work, p - 1 over m of it idle."""
    one = training(pp=4, dp=8, workload=dataclasses.replace(WORKLOAD, mean_response_tokens=1))
    stage, head = one.stage_s(backward=True), one.head_s(backward=True)
    m = one.num_microbatches
    assert one.pass_s(backward=True) == pytest.approx(3 * stage + m * (stage + head))
    many = training(pp=4, dp=8, sections={"batch": {"max_tokens_per_microbatch": 4096}})
    few = training(pp=4, dp=8)
    assert many.num_microbatches == math.ceil(many.num_tokens / 4096) > few.num_microbatches
    assert many.pass_s(backward=False) < few.pass_s(backward=False)


def test_tensor_parallel_bytes():
    """Sequence parallelism gathers twice again in the backward pass: 10 units against 8."""
    plain, sequence = training(tp=8, dp=1, sp=False), training(tp=8, dp=1)
    hidden = plain.num_tokens / plain.num_microbatches * 3584 * 2
    unit = hidden * 7 / 8 / 450e9
    assert plain._tensor_s(backward=False) == pytest.approx(4 * unit)
    assert plain._tensor_s(backward=True) == pytest.approx(8 * unit)
    assert sequence._tensor_s(backward=True) == pytest.approx(10 * unit)
    assert training(dp=8)._tensor_s(backward=True) == 0


def test_gradients_travel_by_link_or_network():
    link = training(dp=8).optimizer_s()
    network = training(dp=64).optimizer_s()
    weights = sum(training(dp=8)._weights())
    assert link > weights * 6 * 7 / 8 / 450e9
    # Eight adapters of a node side by side are not the bottleneck: 400 against 450 GB/s.
    assert network == pytest.approx(weights * 6 * 63 / 64 / 400e9, rel=0.2)
    assert GPUS["h200"].group_bandwidth(8, stride=8) == 50e9
    assert GPUS["h200"].group_bandwidth(8, stride=1) == 450e9
    assert GPUS["h200"].group_bandwidth(16, stride=4) == 100e9
    # Three nodes, TP 2, PP 4, DP 3: ranks 6, 8 and 10 are in two nodes, 6 alone in its own.
    assert GPUS["h200"].group_bandwidth(3, stride=2) == 50e9
    assert GPUS["h200"].group_bandwidth(4, stride=2) == 450e9


def test_an_untied_model_on_one_stage_has_two_tables():
    """R1-Distill-Qwen-1.5B: 1.777e9 parameters, of which 0.233e9 are the second table."""
    name = "DeepSeek-R1-Distill-Qwen-1.5B"
    shape, table = Shape.of(hf(name)), 151936 * 1536
    one, _ = shape.weights_per_rank(tp_size=1, pp_size=1, ep_size=1)
    two, _ = shape.weights_per_rank(tp_size=1, pp_size=2, ep_size=1)
    assert one == pytest.approx(NUM_PARAMETERS[name], rel=1e-3)
    assert two == pytest.approx((one - 2 * table) / 2 + table)


def test_experts_talk_within_the_node_or_across():
    inside = training("Qwen3-30B-A3B", dp=32, ep=8)
    across = training("Qwen3-30B-A3B", dp=32, ep=16)
    tokens = inside.num_tokens / inside.num_microbatches
    sent = tokens * 8 * 2048 * 2
    assert inside._experts_s(backward=False) == pytest.approx(2 * sent * 7 / 8 / 450e9)
    # Of 16 ranks 8 are in the same node: half of the tokens leave it.
    assert across._experts_s(backward=True) == pytest.approx(4 * sent * 8 / 16 / 50e9)
    # A rank's share of the experts is added up over those that hold the same.
    assert across.optimizer_s() < inside.optimizer_s()


def test_context_parallel_ranks_share_the_work_and_pass_keys_on():
    one, two = training(dp=4), training(cp=4, dp=4)
    tokens = one.num_tokens / one.num_microbatches
    assert (two.num_tokens, two.num_microbatches) == (one.num_tokens, one.num_microbatches)
    assert two.head_s(backward=True) == one.head_s(backward=True) / 4
    # Keys and values of 4 heads x 128, bf16, to three neighbours; twice as much on the way back.
    ring = 3 * tokens / 4 * 2 * 512 * 2 / 450e9
    assert two._context_s(backward=False) == pytest.approx(ring)
    assert two._context_s(backward=True) == pytest.approx(3 * ring)
    assert training(cp=4, dp=4, recompute="full")._context_s(backward=True) == pytest.approx(
        4 * ring
    )
    assert one._context_s(backward=True) == 0
    forward = two.stage_s(backward=False) - 28 * two._context_s(backward=False)
    assert forward == pytest.approx(one.stage_s(backward=False) / 4)
    # Sixteen ranks share gradients and optimizer, as if all were data parallel.
    assert two.optimizer_s() == pytest.approx(training(dp=16).optimizer_s())


def test_sync_moves_the_whole_model_through_every_rank():
    alone, cut = sync_s(training(dp=8)), sync_s(training(tp=2, pp=2, dp=2))
    size = 2 * NUM_PARAMETERS["Qwen2.5-7B"]
    assert alone == pytest.approx(2 * size / 4.8e12, rel=1e-6)
    # Halves over the link, and a half's broadcast to the other stage, all in a node.
    assert cut - alone == pytest.approx(size / 2 / 450e9 * 2, rel=1e-6)


def test_rewards():
    costly = Efficiency(verdict_s=0.01)
    assert reward_s(config(), layout(dp=8), GPUS["h200"], costly) == pytest.approx(
        2048 / 8 / 8 * 0.01
    )
    four = config(reward={"num_workers": 4})
    assert reward_s(four, layout(dp=8), GPUS["h200"], costly) == pytest.approx(2048 / 8 / 4 * 0.01)


def test_step_time_is_made_of_its_stages():
    model = hf("Qwen2.5-7B")
    one = step_time(model, config(), layout(dp=8), WORKLOAD, GPUS["h200"], Efficiency())
    parts = [getattr(one, field.name) for field in dataclasses.fields(one)]
    assert one.total_s == sum(parts)
    assert all(part > 0 for part in parts)
    assert one.update_s == 4 * training(dp=8, efficiency=Efficiency()).update_s()
    # The same model on a device with a sixth of the products and a little less bandwidth.
    slow = step_time(model, config(), layout(dp=8), WORKLOAD, GPUS["h20"], Efficiency())
    assert slow.update_s > 5 * one.update_s
    assert slow.generation_s < 2 * one.generation_s
