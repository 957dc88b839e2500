"""Weights over the bridge into a real vLLM engine: in buckets of any size, whole or refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gapo_megatron.compat import vllm_weights
from gapo_megatron.compat.vllm import LLMEngine
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.models.rules import split_all, to_megatron
from gapo_megatron.models.tables import rules_for
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.rollout.vllm.digests import Digests, differing, digest, hashes, module_of
from gapo_megatron.rollout.vllm.weights import check_loaded
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run.process_group import World
from tests.dist import run_distributed, run_sides
from tests.rollout_setup import (
    SIZES,
    VOCAB,
    build_engine,
    make_config,
    make_model,
    perturb,
    vllm_environment,
)
from tests.transfer_setup import exported_of

KINDS = ("dense", "tied", "experts", pytest.param("sigmoid", marks=pytest.mark.system))
BUCKETS = (1, 2**20, 2**30)
"""Every parameter by itself; a layer in several buckets; a layer in one."""
EXPERTS = {
    "head_dim": 64,
    "num_key_value_heads": 1,  # fewer than ranks: each has a copy
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "tie_word_embeddings": False,
}
# Routers with a correction bias, behind a dense layer.
SIGMOID = {
    "head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
BIAS = "e_score_correction_bias"


def model_of(kind: str) -> PreTrainedModel:
    """Its layers are larger than a bucket of 1 MiB, a layer's experts many times that."""
    if kind in ("dense", "tied"):
        return make_model(tied=kind == "tied")
    torch.manual_seed(0)
    if kind == "sigmoid":
        return Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES | SIGMOID))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | EXPERTS))


def save_versions(folder: Path, kind: str) -> Path:
    """Two versions of a model that differ in every tensor, under Hugging Face's names."""
    for version in (0, 1):
        model = model_of(kind)
        perturb(model, seed=version)
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS):
                buffer.data.normal_(0, 0.1)
        model.save_pretrained(folder / kind / str(version))
    return folder / kind


def weights_of(folder: Path, version: int) -> list[tuple[str, Tensor]]:
    """In the order in which a policy exports tensors: by layer."""
    tensors = load_file(folder / str(version) / "model.safetensors")
    return sorted(tensors.items(), key=lambda pair: (module_of(pair[0]), pair[0]))


def engine_for(folder: Path, *, size: int = 1) -> RolloutEngine:
    names = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
    os.environ |= {name: vllm_environment()[name] for name in names}
    return build_engine(make_config(folder / "0", tensor_parallel_size=size))


def probe() -> Rollouts:
    ids = np.random.default_rng(0).integers(2, VOCAB, (3, 40)).astype(np.int32)
    return Rollouts.of(list(ids[:, :4]), list(ids[:, 4:]))


def _transfer(world: World, folder: Path) -> tuple[list[float], list[str]]:
    """Mean difference of log-probs from in-place weights, for every bucket size; and `_plant`."""
    assert world.bridge is not None
    bridge = world.bridge
    rules = rules_for(AutoConfig.from_pretrained(folder / "0"))
    exported = exported_of(rules, num_ranks=1)
    if not bridge.is_generation:
        shards = dict(to_megatron(rules, weights_of(folder, 1)))
        for size in BUCKETS:
            bridge._route.bucket_bytes = size
            bridge.send_shards(exported, shards.__getitem__)
        return [], []
    engine, differences = engine_for(folder), []
    engine.update_weights(weights_of(folder, 1), policy_version=0)
    expected = np.concatenate(engine.score(probe()))
    for version, size in enumerate(BUCKETS, 1):
        bridge._route.bucket_bytes = size
        engine.update_weights(weights_of(folder, 0), policy_version=version)
        assert np.abs(np.concatenate(engine.score(probe())) - expected).mean() > 0.1
        received = split_all(rules, bridge.receive_whole(exported))
        engine.update_weights(received, policy_version=version)
        found = np.concatenate(engine.score(probe()))
        differences.append(float(np.abs(found - expected).mean()))
    return differences, _plant(engine, weights_of(folder, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_of_any_size_bring_the_weights_of_a_colocated_engine(
    tmp_path: Path, kind: str
) -> None:
    """VLLM holds the tensors of a fused module; buckets are smaller than a module or a tensor.

    No changed bit is missed: of embedding, norms, biases, every matrix, the router, every expert,
    the head.
    """
    _, (differences, missed) = run_sides(_transfer, 1, 1, save_versions(tmp_path, kind))
    assert differences == [0.0] * len(BUCKETS) and missed == []


def _plant(engine: RolloutEngine, weights: list[tuple[str, Tensor]]) -> list[str]:
    """Change a bit of a tensor sent to vLLM's last rank; returns undetected changes.

    Changes at least one bit of every tensor, and every bit position of an element. The last rank
    holds the last element of every tensor, of some alone, of others with the other ranks.
    """
    missed, num_bits = [], 8 * weights[0][1].element_size()
    load = vllm_weights.load_weights
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for i in range(max(len(weights), num_bits)):
        (stale, tensor), bit = weights[i % len(weights)], i % num_bits
        other = _flipped(tensor, bit)
        load_other = _substituting(load, stale, other) if is_last else load
        with patch.object(vllm_weights, "load_weights", load_other):
            try:
                engine.update_weights(weights, policy_version=1)
            except WeightSyncError as error:
                assert engine.policy_version == -1
                if module_of(stale) in str(error) and "1 modules" in str(error):
                    continue
        missed.append(f"bit {bit} of {stale}")
    engine.update_weights(weights, policy_version=2)
    return missed


def _flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy, with this bit of its last element changed; 0 is the least significant one."""
    other = tensor.clone()
    one = torch.ones((), dtype=torch.int64) << bit
    bits = other.view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    bits[-1:] ^= one.to(bits.dtype)  # the sign wraps
    return other


def _substituting(
    load: Callable[..., list[str]], stale: str, other: Tensor
) -> Callable[..., list[str]]:
    """`load_weights`, which gets `other` in place of the tensor named `stale`."""

    def load_other(
        llm: LLMEngine,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        note: Callable[[str, Tensor, int], None],
    ) -> list[str]:
        changed = ((name, other if name == stale else tensor) for name, tensor in tensors)
        return load(llm, changed, note=note)

    return load_other


def _plant_over_ranks(folder: Path) -> list[str]:
    size = dist.get_world_size()
    os.environ |= vllm_environment(dist.get_rank(), size)
    return _plant(engine_for(folder, size=size), weights_of(folder, 1))


@pytest.mark.system
@pytest.mark.parametrize("kind", KINDS)
def test_no_changed_bit_on_one_of_two_ranks_is_missed(tmp_path: Path, kind: str) -> None:
    for missed in run_distributed(_plant_over_ranks, 2, save_versions(tmp_path, kind)):
        assert missed == []


def test_no_two_values_have_the_same_hash() -> None:
    every = torch.arange(2**16).to(torch.int16)
    halves = every.view(torch.float16)
    random = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    singles = random.int().unique().view(torch.float32)
    # A CPU makes quiet NaNs of float16's signalling ones, and thereby two of one.
    for values in (every.view(torch.bfloat16), halves[~halves.isnan()], singles):
        found = hashes(values)
        assert len(found.unique()) == len(values)
    assert hashes(torch.zeros(3)).tolist() == [0, 0, 0]


def test_digests_do_not_depend_on_order_cut_or_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(64, 48, generator=generator).bfloat16()
    sent = Digests()
    sent.note("model.layers.11.mlp.up_proj.weight", whole)
    parts = [Digests(), Digests()]
    padded = torch.cat([whole.t()[:20], torch.zeros(3, 64)])
    parts[0].note("model.layers.11.mlp.gate_up_proj.weight", padded, times=2)
    parts[1].note("model.layers.11.mlp.gate_up_proj.weight", whole.t()[20:].float(), times=2)
    assert differing(sent, parts) == []
    swapped = whole.clone()  # a sum of bits alone would not see these two
    swapped.view(torch.int16)[0, 0] += 1
    swapped.view(torch.int16)[1, 1] -= 1
    assert digest(swapped) != digest(whole)
    assert differing(sent, parts[:1]) == ["model.layers.11.mlp"]
    assert differing(Digests(), parts[:1]) == ["model.layers.11.mlp"]


@pytest.mark.parametrize("stale", range(4))
def test_every_copy_counts(stale: int) -> None:
    """On four ranks: a norm on all, and keys and values on two ranks each."""
    norm, heads = torch.ones(8), torch.arange(1.0, 17).view(2, 8)
    sent = Digests()
    sent.note("model.layers.0.input_layernorm.weight", norm)
    sent.note("model.layers.0.self_attn.k_proj.weight", heads)
    for changed in (0.0, 1.0):
        parts = [Digests() for _ in range(4)]
        for rank, part in enumerate(parts):
            by = changed if rank == stale else 0.0
            part.note("model.layers.0.input_layernorm.weight", norm + by, times=1)
            part.note("model.layers.0.self_attn.qkv_proj.weight", heads[rank // 2] + by, times=2)
        modules = ["model.layers.0.input_layernorm", "model.layers.0.self_attn"]
        assert differing(sent, parts) == (modules if changed else [])


CASES = [(2, (), None), (2, (3,), 2), (2, (1, 2), 0), (1, (2,), 2), (4, (1,), 0)]
"""Ranks of a replica, ranks with other weights, and the one that an error names."""


def _check_over_replicas() -> list[str]:
    """The errors of this rank."""
    errors = []
    for size, stale, _ in CASES:
        replicas = Replicas.create(size, gloo_group=dist.group.WORLD)
        sent, loaded = Digests(), Digests()
        sent.note("model.norm.weight", torch.ones(4))
        loaded.note("model.norm.weight", torch.ones(4) * (1 + (replicas.rank in stale)))
        try:
            check_loaded(sent, loaded, replicas)
            errors.append("")
        except WeightSyncError as error:
            errors.append(str(error))
    return errors


def test_an_engine_that_differs_ends_every_rank() -> None:
    for errors in run_distributed(_check_over_replicas, 4):
        for error, (_, _, named) in zip(errors, CASES, strict=True):
            if named is None:
                assert error == ""
            else:
                assert f"rank {named} " in error and "model.norm" in error
