"""Times of a step: decoding and its tail, verdicts, the weight sync, the sum of the stages."""

import math

import numpy as np
import pytest
import torch

from gapo_megatron.rollout.vllm.adapter import slots_for
from gapo_tools.planner.engine import Decoding, generation_s, sends_factors
from gapo_tools.planner.flops import Shape
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.training import Training
from tests.scaling_setup import H200, IDEAL, WORKLOAD, config, draw_lengths, hf

MOE = "Qwen3-30B-A3B"


def decoding(model="Qwen2.5-7B", *, tp=1, efficiency=IDEAL, **changes):
    shape = Shape.of(hf(model))
    return Decoding(shape, tp, 2, H200.bf16_flops, H200, efficiency, **changes)


def test_one_sequence_waits_for_the_weights():
    """7.07 billion weights meet a token (no embedding): 14.1 GB at 4.8 TB/s are 2.9 ms."""
    step = decoding().step_s(np.array([1.0]), np.array([0.0]))[0]
    weights = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944) + 152064 * 3584
    assert step == pytest.approx(2 * weights / 4.8e12, rel=1e-9)


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


WITH_FACTORS = [
    *(("Qwen2.5-7B", ["fc2"]), (MOE, ["qkv", "experts"]), (MOE, ["qkv"])),
    ("Moonlight-16B-A3B", ["proj"]),  # latent attention
]


@pytest.mark.parametrize(
    ("precision", "quantization"), [("bf16", ""), ("bf16", "fp8"), ("fp32", "")]
)
@pytest.mark.parametrize(("model", "targets"), WITH_FACTORS)
def test_who_gets_factors_is_what_the_engine_says(precision, quantization, model, targets):
    run = config(
        adapter={"kind": "lora", "rank": 512, "targets": targets},
        model={"precision": precision},
        rollout={"quantization": quantization},
    )
    shape = Shape.of(hf(model))
    slots = slots_for(run, hf(model), torch.device("cuda"))
    assert sends_factors(shape, run) == (slots is not None)
    assert not sends_factors(shape, config())
