"""Activations against what autograd saves on a CPU; the parts of memory by hand."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from gapo_megatron.learn.routes import Recorded, StepRoutes
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.logprob import tiles
from gapo_megatron.ops.plan.activations import (
    Kernels,
    kept_activations,
    neighbour_bytes,
    num_in_flight,
    routes_bytes,
)
from gapo_megatron.ops.plan.fit import HOST_SHARE, OUT_OF_HOST, find_refusal
from gapo_megatron.ops.plan.hardware import GPUS
from gapo_megatron.ops.plan.head import block_shape
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import Memory, memory
from gapo_megatron.ops.plan.no_data import KeptForBackward, fake_groups
from gapo_megatron.policy import Policy
from gapo_megatron.rollouts import Rollouts
from tests.scaling_setup import (
    SINKS,
    TINY,
    TINY_EXPERTS,
    TINY_LATENT,
    TINY_SIGMOID,
    WIDE,
    WIDE_QWEN3,
    make_config,
    parallel_of,
    read_model,
    schedule_of,
    write_model,
)
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
    with patch.object(tiles, "KEPT_BYTES", 0), kept:  # a CPU keeps logits
        update(policy, [microbatch], lambda scored: (-scored.log_probs.sum(), {}))
    return kept.peak_bytes


@pytest.mark.parametrize(
    ("fields", "precision", "recompute", "parallel", "world_size", "targets"),
    [
        (WIDE, "fp32", "none", ALONE, 1, ()),
        (WIDE, "fp32", "selective", ALONE, 1, ()),
        (WIDE, "bf16", "none", ALONE, 1, ()),
        (WIDE, "bf16", "selective", ALONE, 1, ()),
        (WIDE, "fp16", "selective", ALONE, 1, ()),
        (WIDE, "bf16", "full", ALONE, 1, ()),
        (WIDE, "bf16", "none", parallel_of(2, 1), 2, ()),
        (WIDE_QWEN3, "bf16", "none", TWO, 4, ()),
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


def test_routes_are_what_the_old_pass_records(tmp_path: Path) -> None:
    """Of all mini-batches but the first; two micro-batches each."""
    config = make_config(
        write_model(tmp_path, TINY_EXPERTS),
        batch={"rollout_prompts": 4, "minibatch_prompts": 2, "rollouts_per_prompt": 2},
    )
    with fake_groups(config.parallel, rank=0, world_size=1) as groups:
        policy = Policy.build(config, groups, "cpu")
        with torch.no_grad():
            for parameter in policy.stages[0].parameters():
                parameter.fill_(0.0)
        recorded = Recorded()
        batch = full_batch(256)
        routes = StepRoutes(policy, batch, recorded, replayed="trainer")
        packed = [policy.pack(batch, [0, 1])] * 2
        log_probs(policy, routes.recording(1, packed))
        found = sum(ids.nbytes for one in recorded.routes[1] for ids in one.values())
    hf_config, layout = read_model(tmp_path, TINY_EXPERTS), Layout.of(config, world_size=1)
    assert routes_bytes(hf_config, config, layout, stage=0) == found == 2 * 256 * 4 * 2
    halves = make_layout(tp=2, pp=2, dp=1, ep=2)
    assert [routes_bytes(hf_config, config, halves, stage=i) for i in (0, 1)] == [found // 4] * 2
    alone = make_config(str(tmp_path), batch={"rollout_prompts": 2, "minibatch_prompts": 2})
    assert routes_bytes(hf_config, alone, layout, stage=0) == 0
    of_engine = make_config(str(tmp_path), batch=config.batch.model_dump(exclude_unset=True),
                            objective={"routing_replay": "rollout"})  # fmt: skip
    assert routes_bytes(hf_config, of_engine, layout, stage=0) == found
    assert routes_bytes(read_model(tmp_path, TINY), config, layout, stage=0) == 0


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


def held_for_neighbours(layout: Layout, num_microbatches: int, rank: int) -> int:
    """Most inputs and outputs of stages at once, in the order of Megatron-core's schedule.

    Both are there until the stage has gone back. With virtual stages the next forward pass's input
    is received before the backward pass that comes first.
    """
    own = schedule_of(layout, num_microbatches, rank=rank)
    last = layout.pp_size * layout.vpp_size - 1
    following = dict(itertools.pairwise(own.forward)) if layout.vpp_size > 1 else {}
    inputs, outputs, most = set(), set(), 0
    for task in own.order:
        key = task[1:]
        if task.is_backward:
            inputs.discard(key)
            outputs.discard(key)
            continue
        inputs |= {one[1:] for one in (task, following.get(task)) if one and one.stage > 0}
        outputs |= {key} if task.stage < last else set()
        most = max(most, len(inputs) + len(outputs))
    return most


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 3), (8, 2), (8, 4)])
def test_what_is_held_for_neighbours(tmp_path: Path, pp: int, vpp: int) -> None:
    hf_config, layout = read_model(tmp_path, WIDE), make_layout(pp=pp, vpp=vpp)
    config, hidden = make_config(str(tmp_path)), 256 * 64 * 2
    for rounds, spare in ((1, 1), (2, 0), (3, 0)):
        for rank in range(pp):
            held = neighbour_bytes(
                hf_config, config, layout, stage=rank, num_microbatches=rounds * pp
            )
            found = held_for_neighbours(layout, rounds * pp, rank)
            assert found * hidden <= held <= (found + spare) * hidden


LORA = {"kind": "lora", "rank": 8, "targets": ("qkv", "proj", "fc1", "fc2")}


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_an_adapters_run_copies_its_weights_to_measure_rounding(
    tmp_path: Path, offload: str
) -> None:
    """Four bytes each; the gradients, which give their room up, are next to nothing."""
    hf_config = read_model(tmp_path, WIDE | {"num_hidden_layers": 64, "vocab_size": 200_000})

    def predict(**sections: dict[str, Any]) -> Memory:
        short = {"adapter": LORA, "optimizer": {"offload": offload}, "model": {"recompute": "full"}}
        config = make_config(str(tmp_path), **(short | sections))
        return memory(hf_config, config, make_layout(tp=1), GPUS["h100"])

    found = predict()
    stage, layer = found.trainer, 64 * 128 + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert stage.exact_copy == 4 * (200_000 * 64 + 64 * layer + 64)
    there = stage.weights + (0 if offload != "none" else stage.optimizer) + stage.communication
    at_work = stage.engine_asleep + max(stage.layer, stage.head)
    assert found.training == there + at_work + stage.exact_copy > stage.updating
    # Nothing is measured, or the gradients' memory is as large.
    silent = predict(metrics={"rounding_every_steps": 0})
    behind = predict(
        optimizer={"offload": "none"},
        objective={"old_log_probs": "rollout"},
        rollout={"max_staleness": 1, "generation_nodes": 1, "max_response_tokens": 96},
    )
    full = predict(adapter={"kind": "none"})
    for one in (silent, behind, full, predict(model={"precision": "fp32"})):
        assert one.trainer.exact_copy == 0 and one.training == one.trainer.updating
    # Of a GPU with room for an update alone.
    gpu = dataclasses.replace(GPUS["h100"], memory_bytes=(stage.updating + found.training) // 2)
    layout = make_layout(tp=1)
    refusal = find_refusal(found, layout, gpu)
    assert refusal is not None and "metrics.rounding_every_steps" in refusal.reason
    assert find_refusal(silent, layout, gpu) != refusal


@pytest.mark.parametrize(
    ("sections", "num_generation", "keeps"),
    [
        ({}, 0, True),
        ({}, 8, False),
        ({"adapter": {"kind": "none"}}, 0, False),
        ({"rollout": {"quantization": "fp8", "max_response_tokens": 96}}, 0, False),
    ],
)
def test_an_engine_that_gets_factors_sleeps_in_host_memory(
    tmp_path: Path, sections: dict[str, Any], num_generation: int, keeps: bool
) -> None:
    hf_config = read_model(tmp_path, WIDE)
    config = make_config(str(tmp_path), **({"adapter": LORA} | sections))
    layout = dataclasses.replace(make_layout(rollout_tp=2), num_generation=num_generation)
    found = memory(hf_config, config, layout, GPUS["h100"])
    assert found.offloaded == keeps * found.engine.rollout_weights
    # A node's host memory must hold it: eight shards of it, with eight checkpoints.
    needed = 8 * (found.offloaded + found.checkpoint) / HOST_SHARE
    for host, fits in ((1.01, True), (0.99, False)):
        gpu = dataclasses.replace(GPUS["h100"], host_memory_bytes=int(host * needed))
        refusal = find_refusal(found, dataclasses.replace(layout, num_generation=0), gpu)
        assert (refusal is None) == fits
        assert refusal is None or refusal.reason == OUT_OF_HOST


@pytest.mark.parametrize("vocab", [16, 64, 97, 2048, 8191, 8192, 151936])
def test_the_heads_block_is_that_of_its_code(vocab: int) -> None:
    """Written down once more, for a plan must not wait for torch."""
    weight = torch.empty(vocab, 32, device="meta")
    assert block_shape(vocab) == tiles.block_shape(weight)
