"""Times of a step: decoding and its tail, verdicts, the weight sync, the sum of the stages."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from gapo_megatron.ops.plan.flops import Shape, engine_bytes, kv_cache_bytes, sends_factors
from gapo_megatron.ops.plan.hardware import CPU_NAME, GPUS, Efficiency
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.sync_times import sync_s
from gapo_megatron.ops.plan.times import Decoding, generation_s, reward_s, step_time
from gapo_megatron.ops.plan.training import Training
from gapo_megatron.ops.plan.workload import Workload
from gapo_megatron.rollout.vllm.adapter import slots_for, why_merged
from tests.hf.test_convert_models import NUM_PARAMETERS
from tests.scaling_setup import H200, IDEAL, WORKLOAD, config, draw_lengths, hf, layout, training

MOE = "Qwen3-30B-A3B"


def decoding(model="Qwen2.5-7B", *, tp=1, efficiency=IDEAL, **changes):
    shape = Shape.of(hf(model))
    return Decoding(shape, tp, 2, H200.bf16_flops, H200, efficiency, **changes)


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


def test_quantised_layers_are_read_and_multiplied_in_fp8():
    """A byte a weight, at twice the rate; the output layer, attention and the cache stay bf16."""
    step, shape = decoding(quantized=True), Shape.of(hf("Qwen2.5-7B"))
    layers, head = 28 * shape.layer_weights, shape.head_weights
    one, many = step.step_s(np.array([1.0, 100_000.0]), np.zeros(2))
    assert one == pytest.approx((layers + 2 * head) / 4.8e12, rel=1e-9)
    assert many == pytest.approx(2e5 * (layers / 1979e12 + head / 989e12), rel=1e-9)
    keys = decoding().step_s(np.array([64.0]), np.array([20_000.0]))[0] - layers / 4.8e12
    assert step.step_s(np.array([64.0]), np.array([20_000.0]))[0] == pytest.approx(keys, rel=1e-9)


def test_prompts_of_quantised_layers_are_multiplied_in_fp8():
    """A prompt of 1,000 tokens and a response of one: its layers at twice the rate, no more."""
    one = Workload(mean_prompt_tokens=1000, mean_response_tokens=1, longest_response_tokens=1)
    batch = {"rollout_prompts": 1, "minibatch_prompts": 1, "rollouts_per_prompt": 2}
    shape = Shape.of(hf("Qwen2.5-7B"))
    for name, rate, num_bytes in (("", 989e12, 2), ("fp8", 1979e12, 1)):
        layers = 28 * shape.layer_weights
        products = 2 * 1000 * layers / rate
        products += (2 * 1000**2 * 28 * 3584 + 2 * shape.head_weights) / 989e12
        weights = (num_bytes * layers + 2 * shape.head_weights) / 4.8e12
        keys = 2 * 1000.5 * 28 * 2 * 512 * 2 / 4.8e12  # half way through the token
        found = seconds(one, world=1, quantization=name, **batch)
        assert found == pytest.approx(products + weights + keys, rel=1e-6)


def seconds(
    workload=WORKLOAD,
    *,
    kv_gib=60.0,
    world=8,
    tp=1,
    model="Qwen2.5-7B",
    quantization="",
    **batch,
):
    shape = Shape.of(hf(model))
    fraction = (kv_gib * 2**30 + 2 * shape.num_parameters / tp) / H200.memory_bytes
    settings = config(
        batch=batch,
        rollout={
            "memory_fraction": fraction,
            "quantization": quantization,
            "tensor_parallel_size": tp,
        },
    )
    cut = Layout.of(settings, world_size=world)
    return generation_s(Training(shape, settings, cut, workload, H200, IDEAL))


def test_the_longest_response_holds_the_batch():
    """A simulation of one replica, step by step, among eight: the mean over many draws."""
    rng = np.random.default_rng(0)
    step = decoding()
    simulated = []
    for drawn in draw_lengths(rng, (20, 8, 256), mean=700, spread=WORKLOAD.spread):
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


def test_every_round_of_dynamic_sampling_has_its_own_tail():
    one, again = seconds(), seconds(rollout_prompts=77, minibatch_prompts=77)
    some = dataclasses.replace(WORKLOAD, active_share=1 - 77 / 256)
    assert seconds(some, dynamic_sampling_rounds=1) == pytest.approx(one + again)
    # Of a round that one step in four needs, a quarter.
    nearly = dataclasses.replace(WORKLOAD, active_share=1 - 0.25 / 256)
    alone = seconds(nearly, rollout_prompts=1, minibatch_prompts=1)
    assert seconds(nearly, dynamic_sampling_rounds=1) == pytest.approx(one + alone / 4)
    every = dataclasses.replace(WORKLOAD, active_share=1.0)
    assert seconds(every, dynamic_sampling_rounds=3) == one


def test_a_cpu_has_the_cache_it_is_given():
    cpu = dataclasses.replace(H200, name="cpu")
    one = config(rollout={"cpu_kv_cache_gib": 3})
    size = kv_cache_bytes(Shape.of(hf("Qwen2.5-7B")), one, cpu, rollout_tp_size=1)
    assert size == 3 * 2**30


def test_quantised_layers_leave_more_to_the_cache():
    shape = Shape.of(hf("Qwen2.5-7B"))
    room = {
        name: kv_cache_bytes(shape, config(rollout={"quantization": name}), H200, rollout_tp_size=2)
        for name in ("", "fp8")
    }
    assert room["fp8"] - room[""] == 28 * shape.layer_weights / 2


def test_sync_moves_the_whole_model_through_every_rank():
    alone, cut = sync_s(training(dp=8)), sync_s(training(tp=2, pp=2, dp=2))
    size = 2 * NUM_PARAMETERS["Qwen2.5-7B"]
    assert alone == pytest.approx(2 * size / 4.8e12, rel=1e-6)
    # Halves over the link, and a half's broadcast to the other stage, all in a node.
    assert cut - alone == pytest.approx(size / 2 / 450e9 * 2, rel=1e-6)


@pytest.mark.parametrize("cut", [{"dp": 8}, {"tp": 2, "pp": 2, "dp": 2, "rollout_tp": 2}])
def test_sync_of_an_adapter_moves_factors_and_the_sleeping_base(cut):
    """Factors of rank 8 through every rank; the engine's share from host memory and back."""
    lora = {"adapter": {"kind": "lora", "rank": 8, "targets": ("qkv", "fc2")}}
    one = training(sections=lora, **cut)
    # A [8, in] and B [out, 8] of each layer.
    size = 2 * 28 * 8 * (2 * 3584 + 2 * 512 + 18944 + 3584)
    shard = engine_bytes(one.shape, one.config, H200, rollout_tp_size=cut.get("rollout_tp", 1))
    seconds = 2 * size / 4.8e12
    if "tp" in cut:
        seconds += size / 2 / 450e9 * 2
    apart = dataclasses.replace(one, layout=dataclasses.replace(one.layout, num_generation=8))
    assert sync_s(apart) == pytest.approx(seconds, rel=1e-6)
    assert sync_s(one) == pytest.approx(seconds + 2 * shard / 64e9, rel=1e-6)
    # A constant of each tensor: A once, B for query, key and value.
    slow = dataclasses.replace(one, efficiency=dataclasses.replace(IDEAL, tensor_s=1.0))
    assert sync_s(slow) - sync_s(one) == pytest.approx(28 * (1 + 3 + 1 + 1), rel=1e-6)
    # Merged weights are the whole model.
    merged = {"rollout": {"quantization": "fp8", "max_response_tokens": 3092}}
    full = sync_s(training(**cut))
    assert sync_s(training(sections=lora | merged, **cut)) == full > 5 * sync_s(apart)


WITH_FACTORS = [("Qwen2.5-7B", ["fc2"]), (MOE, ["qkv", "experts"]), (MOE, ["qkv"])]
WITH_FACTORS += [("DeepSeek-V3", ["proj"])]  # whose latent attention has none in vLLM


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("quantization", ["", "fp8"])
@pytest.mark.parametrize(("model", "targets"), WITH_FACTORS)
def test_who_gets_factors_is_what_the_engine_says(precision, quantization, model, targets):
    run = config(
        adapter={"kind": "lora", "rank": 512, "targets": targets},
        model={"precision": precision},
        rollout={"quantization": quantization} if precision == "bf16" else {},
    )
    slots, shape = slots_for(run.adapter, hf(model)), Shape.of(hf(model))
    dtype, quantized = getattr(torch, run.model.dtype), bool(run.rollout.quantization)
    for gpu, device in ((H200, "cuda"), (cpu_like(H200), "cpu")):
        why = why_merged(slots, dtype=dtype, device=torch.device(device), quantized=quantized)
        assert sends_factors(shape, run, gpu) == (not why)
    assert not sends_factors(shape, config(), H200)


def cpu_like(gpu):
    return dataclasses.replace(gpu, name=CPU_NAME)


def test_rewards():
    costly = Efficiency(verdict_s=0.01)
    assert reward_s(training(efficiency=costly)) == pytest.approx(2048 / 8 / 8 * 0.01)
    four = {"reward": {"num_workers": 4}}
    found = reward_s(training(efficiency=costly, sections=four))
    assert found == pytest.approx(2048 / 8 / 4 * 0.01)
    again = {"batch": {"dynamic_sampling_rounds": 1}}
    found = reward_s(training(efficiency=costly, sections=again))
    assert found == pytest.approx(1.3 * 2048 / 8 / 8 * 0.01)


MACHINE = (WORKLOAD, H200, Efficiency())


def test_step_time_is_made_of_its_stages():
    model = hf("Qwen2.5-7B")
    one = step_time(model, config(), layout(dp=8), WORKLOAD, H200, Efficiency())
    parts = [getattr(one, field.name) for field in dataclasses.fields(one)]
    assert one.total_s == sum(parts)
    assert all(part > 0 for part in parts)
    assert one.update_s == 4 * training(dp=8, efficiency=Efficiency()).update_s()
    # Of four mini-batches three are scored for old log-probs, and bounds take a pass of each that
    # may have moved.
    scoring = {
        (method, old): training(
            dp=8,
            efficiency=Efficiency(),
            sections={"objective": {"method": method, "old_log_probs": old}},
        ).old_log_probs_s()
        for method in ("dapo", "m2po")
        for old in ("trainer", "rollout")
    }
    a_pass = scoring["dapo", "trainer"] / 3
    assert scoring["m2po", "trainer"] == pytest.approx(6 * a_pass)
    assert scoring["dapo", "rollout"] == 0
    assert scoring["m2po", "rollout"] == pytest.approx(4 * a_pass)
    # A KL term needs the initial weights' log-probs all the same.
    with_kl = {"objective": {"old_log_probs": "rollout", "kl_coef": 0.01}}
    assert training(dp=8, sections=with_kl).old_log_probs_s() > 0
    # 12 bytes a weight, an eighth on each, to the host before generation and back.
    offloading = config(optimizer={"offload": True})
    away = step_time(model, offloading, layout(dp=8), WORKLOAD, H200, Efficiency())
    way = 12 * NUM_PARAMETERS["Qwen2.5-7B"] / 8 / (64e9 * 0.75)
    assert away.sync_s == pytest.approx(one.sync_s + way)
    assert away.update_s == pytest.approx(one.update_s + way)
    # And with the weights, of which every rank has a half: 2 bytes each.
    both = [
        step_time(model, config(optimizer={"offload": what}), layout(tp=2, dp=4), *MACHINE)
        for what in ("optimizer", "all")
    ]
    way = NUM_PARAMETERS["Qwen2.5-7B"] / (64e9 * 0.75)
    # Norms are whole on every rank.
    assert both[1].sync_s - both[0].sync_s == pytest.approx(way, rel=1e-4)
    assert both[1].update_s - both[0].update_s == pytest.approx(way, rel=1e-4)
    # The same model on a device with a sixth of the products and a little less bandwidth.
    slow = step_time(model, config(), layout(dp=8), WORKLOAD, GPUS["h20"], Efficiency())
    assert slow.update_s > 5 * one.update_s
    assert slow.generation_s < 2 * one.generation_s
