"""Activations against what autograd saves on a CPU; what does not fit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gapo_megatron.learn.update import update
from gapo_megatron.logprob import tiles
from gapo_megatron.policy import Policy
from gapo_megatron.rollouts import Rollouts
from gapo_tools.planner.activations import Kernels, block_shape, kept_activations, num_in_flight
from gapo_tools.planner.hardware import GPUS
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import HOST_SHARE, find_refusal, memory
from gapo_tools.planner.no_data import KeptForBackward, fake_groups, memory_of_a_gpu
from tests.scaling_setup import (
    H200,
    SINKS,
    TINY_EXPERTS,
    TINY_LATENT,
    TINY_SIGMOID,
    WIDE,
    WIDE_QWEN3,
    hf,
    make_config,
    parallel_of,
    read_model,
    schedule_of,
    write_model,
)
from tests.scaling_setup import config as usual_config
from tests.scaling_setup import layout as make_layout

ALONE, TWO = parallel_of(1, 1), parallel_of(2, 1, sp=True)


def full_batch(num_tokens: int) -> Rollouts:
    """Two sequences of one length that fill a micro-batch, nearly all of it responses."""
    length = num_tokens // 2
    prompts, responses = ([np.zeros(n, np.int32)] * 2 for n in (2, length - 1))
    return Rollouts.of(prompts, responses)


def measured(policy: Policy, num_tokens: int) -> int:
    """Most bytes that autograd keeps during an update of one full micro-batch, as on a GPU."""
    with torch.no_grad():
        for parameter in policy.stages[0].parameters():
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    microbatch = policy.pack(full_batch(num_tokens), [0, 1])
    assert microbatch.tokens.shape == (1, num_tokens)
    kept = KeptForBackward(besides=policy.stages[0].parameters())
    with memory_of_a_gpu(), kept:
        update(policy, [microbatch], lambda scored: (-scored.log_probs.sum(), {}))
    return kept.peak_bytes


@pytest.mark.parametrize(
    ("fields", "precision", "recompute", "parallel", "world_size", "targets"),
    [
        (WIDE, "bf16", "none", ALONE, 1, ()),
        (WIDE, "bf16", "selective", ALONE, 1, ()),
        (WIDE, "bf16", "none", parallel_of(2, 1), 2, ()),
        (WIDE_QWEN3, "bf16", "selective", TWO, 2, ()),
        (TINY_EXPERTS, "bf16", "none", ALONE, 1, ()),
        (TINY_SIGMOID, "bf16", "none", ALONE, 1, ()),
        (SINKS, "bf16", "none", ALONE, 1, ()),
        (SINKS, "bf16", "selective", ALONE, 1, ()),
        (TINY_LATENT, "fp32", "none", ALONE, 1, ()),
        (TINY_LATENT, "bf16", "selective", ALONE, 1, ()),
        (WIDE, "fp32", "none", ALONE, 1, ("qkv", "proj", "fc1", "fc2")),
        (WIDE, "bf16", "full", ALONE, 1, ("qkv", "proj", "fc1", "fc2")),
        (WIDE_QWEN3, "bf16", "none", TWO, 2, ("qkv", "proj", "fc1", "fc2")),
        (TINY_EXPERTS, "bf16", "none", ALONE, 1, ("qkv", "proj", "experts")),
        (TINY_LATENT, "bf16", "none", ALONE, 1, ("qkv", "proj", "fc1", "fc2", "experts", "latent")),
    ],
)
def test_activations_are_what_autograd_keeps(
    tmp_path: Path,
    fields: dict[str, Any],
    precision: str,
    recompute: str,
    parallel: dict[str, Any],
    world_size: int,
    targets: tuple[str, ...],
) -> None:
    rank = 64 if "latent" in targets else 16  # two of eleven factors must show
    config = make_config(
        write_model(tmp_path, fields),
        model={"precision": precision, "recompute": recompute},
        parallel=parallel,
        adapter={"kind": "lora", "rank": rank, "targets": targets} if targets else {},
    )
    hf_config = read_model(tmp_path, fields)
    layout = Layout.of(config, world_size=world_size)
    predicted = kept_activations(
        hf_config, config, layout, stage=0, num_microbatches=1, kernels=Kernels.PADDED
    ).most
    with fake_groups(config.parallel, rank=0, world_size=world_size) as groups:
        found = measured(Policy.build(config, groups, "cpu"), 256)
    assert predicted == pytest.approx(found, rel=0.05), predicted / found


def test_our_layers_with_one_kernel_of_attention_recompute_the_mlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU attention of sequences that need no padding keeps what the kernel does."""
    monkeypatch.setattr("gapo_megatron.policy.model.has_fused_kernel", lambda *_: True)
    fields = WIDE | {"model_type": "olmo2"}
    config = make_config(
        write_model(tmp_path, fields), model={"precision": "bf16", "recompute": "selective"}
    )
    hf_config = read_model(tmp_path, fields)
    layout = Layout.of(config, world_size=1)
    kernels = Kernels.of(hf_config, config, layout)
    assert kernels is Kernels.FLASH
    kept = kept_activations(hf_config, config, layout, stage=0, num_microbatches=1, kernels=kernels)
    assert kept.recomputed == 256 * 5 * 2 * fields["intermediate_size"]
    with fake_groups(config.parallel, rank=0, world_size=1) as groups:
        found = measured(Policy.build(config, groups, "cpu"), 256)
    assert kept.most == pytest.approx(found, rel=0.05), kept.most / found


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 3), (8, 2)])
def test_in_flight_is_the_warm_up_and_one_more(pp: int, vpp: int) -> None:
    """Megatron-core's own count, of more micro-batches than are ever in flight, and of fewer."""
    layout = make_layout(pp=pp, vpp=vpp)
    for rank in range(pp):
        ahead = schedule_of(layout, 4 * pp, rank=rank).num_ahead
        assert num_in_flight(layout, stage=rank, num_microbatches=4 * pp) == ahead + 1
        # Of one round all may be ahead, and none is left to come.
        own = schedule_of(layout, pp, rank=rank)
        most = min(own.num_ahead + 1, len(own.forward))
        assert num_in_flight(layout, stage=rank, num_microbatches=pp) == most
        assert num_in_flight(layout, stage=rank, num_microbatches=1) == vpp


LORA = {"kind": "lora", "rank": 8, "targets": ("qkv", "proj", "fc1", "fc2")}


def test_a_refusal_names_the_first_phase_that_does_not_fit() -> None:
    """Of an adapter's run, whose measurement of rounding needs more than its updates."""
    run = usual_config(adapter=LORA, optimizer={"offload": "all"}, model={"recompute": "full"})
    layout, gpu = make_layout(dp=8, recompute="full"), GPUS["h200"]
    found = memory(hf("Qwen2.5-7B"), run, layout, gpu)
    assert found.trainer.updating < found.training < found.generating
    assert found.offloaded > found.engine.rollout_weights > 0  # a sleeping engine keeps its weights
    limits = {
        found.generating: "",
        found.generating - 1: "smaller rollout.memory_fraction",
        found.training - 1: "metrics.rounding_every_steps",
        found.trainer.updating - 1: "largest part: weights",
    }
    for limit, words in limits.items():
        refusal = find_refusal(found, layout, dataclasses.replace(gpu, memory_bytes=limit))
        assert words in refusal and bool(refusal) == bool(words)
    # Eight shards of what is offloaded, with eight checkpoints.
    needed = 8 * (found.offloaded + found.checkpoint) / HOST_SHARE
    for host, fits in ((1.01, True), (0.99, False)):
        one = dataclasses.replace(gpu, host_memory_bytes=int(host * needed))
        assert bool(find_refusal(found, layout, one)) != fits
    # Without an adapter the gradients' memory is as large as that of the measurement.
    full = memory(hf("Qwen2.5-7B"), usual_config(), layout, gpu)
    assert full.training == full.trainer.updating and full.offloaded == 0


def test_generation_nodes_hold_nothing_but_the_engine() -> None:
    rollout = {"generation_nodes": 1, "memory_fraction": 0.9}
    layout = dataclasses.replace(make_layout(dp=8), num_generation=8)
    found = memory(hf("Qwen2.5-7B"), usual_config(rollout=rollout), layout, GPUS["h200"])
    assert found.trainer.kv_cache == found.trainer.engine_asleep == found.engine.weights == 0
    assert 0.9 * H200.memory_bytes < found.generating < H200.memory_bytes


@pytest.mark.parametrize("vocab", [16, 64, 97, 2048, 8191, 8192, 151936])
def test_the_heads_block_is_that_of_its_code(vocab: int) -> None:
    """Written down once more, for a plan must not wait for torch."""
    weight = torch.empty(vocab, 32, device="meta")
    assert block_shape(vocab) == tiles.block_shape(weight)
