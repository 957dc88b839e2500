"""Sharded weights and factors to ranks that only generate: the trainers' bits from every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from gapo_megatron.models.lora import factors_of, in_pairs, rules_of
from gapo_megatron.models.rules import split_all
from gapo_megatron.policy import destroy
from gapo_megatron.policy.export import exported_by
from gapo_megatron.policy.low_rank import merge_squares, relative_rounding
from gapo_megatron.rollout.adapter_sync import Sending
from gapo_megatron.run.bridge import Bridge
from gapo_megatron.run.process_group import World
from tests.dist import run_sides
from tests.distributed.conversion_setup import save_model
from tests.distributed.lora_setup import RANK, TARGETS, lora_config, lora_of, randomise
from tests.distributed.policy_setup import (
    CP,
    EP,
    PP,
    SP,
    TP,
    VPP,
    load_policy,
    make_config,
    read_weights,
)

SMALL = 20_000
"""Bytes: fits one expert (13,824), and some of a layer's parameters."""
ALL = 2**30

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("qwen2", {}),
    "tensor": ("qwen2", {TP: 2}),
    "tied": ("llama", {TP: 2, SP: True}),
    "pipeline": ("llama", {PP: 2}),
    "virtual stages": ("qwen2", {PP: 2, VPP: 2}),
    "context": ("qwen3", {CP: 2}),
    "expert": ("qwen3_moe", {EP: 2}),
    "expert, tensor": ("qwen3_moe", {EP: 2, TP: 2, SP: True}),
    "expert, context": ("qwen3_moe", {EP: 2, CP: 2}),
    "pipeline, experts": ("qwen3_moe", {PP: 2}),
}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("qwen2", {TP: 2}),
    "data": ("qwen2", {}),
    "virtual stages": ("qwen2", {PP: 2, VPP: 2}),
    "expert, tensor": ("qwen3_moe", {EP: 2, TP: 2, SP: True}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for model in ("qwen2", "llama", "qwen3", "qwen3_moe"):
        save_model(root / model, model)
    return root


def bridge_of(world: World, bucket_bytes: int) -> Bridge:
    assert world.bridge is not None
    world.bridge._route.bucket_bytes = bucket_bytes
    return world.bridge


def send_all(world: World, root: Path) -> list[str]:
    """On receivers: cases whose weights are not the model folder's, all held to the end."""
    assert world.bridge is not None
    wrong = []
    for name, (model, parallel) in CASES.items():
        config = make_config(root / model, parallel=parallel)
        policy = None if world.bridge.is_generation else load_policy(config)
        for bucket_bytes in (SMALL, ALL):
            bridge = bridge_of(world, bucket_bytes)
            if policy is not None:
                bridge.send_shards(policy.exported, policy.shard)
                continue
            hf_config = AutoConfig.from_pretrained(root / model)
            exported = exported_by(config, hf_config, num_ranks=bridge.num_training)
            held = [*split_all(exported.rules, bridge.receive_whole(exported))]
            if not same(held, read_weights(root / model)):
                wrong.append(f"{name}, {bucket_bytes}")
        if policy is not None:
            destroy()
    return wrong


def same(held: list[tuple[str, Tensor]], expected: Iterator[tuple[str, Tensor]]) -> bool:
    """Every tensor once, with the same bits."""
    found, wanted = dict(held), dict(expected)
    return (
        len(found) == len(held)
        and found.keys() == wanted.keys()
        and all(tensor.equal(found[name]) for name, tensor in wanted.items())
    )


@pytest.mark.parametrize("num_receivers", [1, 2, 3])
def test_every_receiver_gets_the_bits_of_every_layout(root: Path, num_receivers: int) -> None:
    """Bit by bit what the model folder holds, for small buckets and for one a layer."""
    assert run_sides(send_all, 2, num_receivers, root) == [[]] * (2 + num_receivers)


def send_adapters(world: World, root: Path, folder: Path) -> list[Any]:
    """Merged weights and factors; trainers write what they hold whole, receivers what they get."""
    rank = torch.distributed.get_rank()
    reports: list[Any] = []
    for name, (model, parallel) in ADAPTED.items():
        bf16 = {"hf_dir": str(root / model), "precision": "bf16"}
        config = lora_config(root / model, model, parallel=parallel, model=bf16)
        bridge = bridge_of(world, SMALL)
        if bridge.is_generation:
            hf_config = AutoConfig.from_pretrained(root / model)
            exported = exported_by(config, hf_config, num_ranks=bridge.num_training)
            merged = [*split_all(exported.rules, bridge.receive_whole(exported))]
            base = [*split_all(exported.rules, bridge.receive_whole(exported))]
            found = factors_of(exported.rules, targets=TARGETS[model], rank=RANK)
            whole = bridge.receive_whole(replace(exported, rules=rules_of(found)))
            received = [merged, base, [*in_pairs(found, whole)]]
            torch.save(received, folder / f"{name}-received{rank}")
            continue
        policy = load_policy(config)
        randomise(policy)
        adapter = lora_of(policy)
        both = Sending(policy, "merged"), Sending(policy, "base")
        for sending in both:
            bridge.send_shards(policy.exported, sending.weight_shard)
        bridge.send_shards(*both[1].factor_shards())
        held = [*policy.iterate_hf_weights()]
        with adapter.switched_off():
            base = [(name, tensor.clone()) for name, tensor in policy.iterate_hf_weights()]
        factors, by_name = [*adapter.whole_factors(policy.stages)], dict(base)
        squares = sum(
            merge_squares(by_name[f"{module}.weight"], a, b, scale=adapter.scale)
            for module, a, b in factors
        )
        torch.save([held, base, factors], folder / f"{name}-sent{rank}")
        exact = relative_rounding(squares)
        reports.append((name, both[0].rounding, both[1].rounding, exact))
        destroy()
    return reports


def test_factors_and_merged_weights_travel_as_shards(root: Path, tmp_path: Path) -> None:
    """And the rounding that is reported is that of whole matrices, counted once."""
    first, second, *_ = run_sides(send_adapters, 2, 2, root, tmp_path)
    for (name, rounding, of_base, exact), (_, also, *_) in zip(first, second, strict=True):
        assert rounding == also == pytest.approx(exact, rel=1e-3) and of_base is None
        # Sums of bf16 products in another order may round to the neighbour.
        assert 1e-3 < rounding < 1
        sent = torch.load(tmp_path / f"{name}-sent0")
        for receiver in (0, 1):
            received = torch.load(tmp_path / f"{name}-received{receiver}")
            for ours, theirs in zip(sent, received, strict=True):
                by_name = {key: tensors for key, *tensors in theirs}
                assert len(ours) == len(theirs) == len(by_name)
                for key, *tensors in ours:
                    assert all(map(torch.equal, tensors, by_name[key])), (name, key)
        assert any(not a.equal(b) for (_, a), (_, b) in zip(sent[0], sent[1], strict=True))
