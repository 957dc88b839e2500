"""Architectures in a real vLLM: weights synced by name, log-probs of the policy, LoRA factors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gapo_megatron.config import AdapterConfig
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.learn.score import log_probs
from gapo_megatron.models.checks import num_experts
from gapo_megatron.policy import destroy
from gapo_megatron.rollout.factors import factor_shapes
from gapo_megatron.rollout.vllm import adapter
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Factors
from tests.convert_setup import pack_experts, pack_linears
from tests.dist import rank_context, run_distributed, single_rank
from tests.distributed import policy_setup
from tests.distributed.conversion_setup import MOONLIGHT, save_model
from tests.rollout_setup import (
    EOS,
    build_engine,
    expected_log_probs,
    generate,
    make_config,
    make_prompts,
    process_group,
    vllm_environment,
)

# What vLLM computes on a CPU: heads of 32 elements; windows shorter than the sequences.
SIZES = {
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "eos_token_id": EOS,
}
MODELS = ("phi3", "seed_oss", "olmo2", "gemma3_text", "glm4_moe", "gpt_oss", "deepseek_v3")
MODELS += ("moonlight",)  # a deepseek_v3 whose rotary positions, in vLLM, are another class's
# Of an expert multiples of 32 elements, which vLLM's kernel wants.
WIDTHS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"moe_intermediate_size": 64, "n_group": 1, "topk_group": 1},  # as published
    "gpt_oss": {"intermediate_size": 160},
    # The one size of latent attention there.
    "deepseek_v3": {
        **{"moe_intermediate_size": 64, "head_dim": 64},
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    },
}
WIDTHS["moonlight"] = WIDTHS["deepseek_v3"] | MOONLIGHT


def targets(folder: Path) -> list[str]:
    """Linear layers with factors: all but experts'."""
    config = AutoConfig.from_pretrained(folder)
    has_mlp = num_experts(config) is None or config.model_type == "glm4_moe"
    return ["qkv", "proj", "fc1", "fc2"] if has_mlp else ["qkv", "proj"]


SCALE = 1.5
Sampled = list[tuple[list[int], list[int], np.ndarray]]
"""Prompts, responses and the engine's log-probs."""

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def vllm_process() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: vLLM changes transformers' classes where it has none of its own."""
    with ProcessPoolExecutor(1, mp_context=rank_context()) as pool:
        yield pool


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    model_type = "deepseek_v3" if request.param == "moonlight" else request.param
    save_model(folder, model_type, **SIZES | WIDTHS.get(request.param, {}))
    if request.param == "gpt_oss":
        pack_experts(folder)  # vLLM must not expect them so
    if request.param == "deepseek_v3":
        pack_linears(folder, (128, 128))  # nor these
    if AutoConfig.from_pretrained(folder).tie_word_embeddings:
        # A large embedding, whose rows are also the output layer's, would repeat a token for sure.
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["model.embed_tokens.weight"] *= 0.1
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def sample(folder: Path, factors: list[Factors] | None) -> Sampled:
    """Build an engine without weights, sync it, and sample; with factors, beside the weights."""
    prompts = make_prompts(4, length=20)
    with process_group():
        adapter: dict[str, Any] = {}
        if factors is not None:
            adapter = {"kind": "lora", "rank": 4, "alpha": 6.0, "targets": targets(folder)}
        built = build_engine(make_config(folder, adapter=adapter), load_weights=False)
        built.wake()
        built.update_weights(read_hf(folder), policy_version=0)
        if factors is not None:
            built.update_adapter(iter(factors), scale=SCALE, policy_version=0)
        groups = generate(built, prompts, num_samples=2, max_response_tokens=24)
        built.close()
    return [
        (list(prompt.token_ids), one.token_ids.tolist(), np.asarray(one.log_probs))
        for prompt, group in zip(prompts, groups, strict=True)
        for one in group
    ]


def load_beside(folder: Path, factors: list[Factors]) -> None:
    """Sync an engine with room for factors that its kernels for experts cannot use on a CPU."""
    with process_group(), patch.object(adapter, "why_merged_on", lambda *_: ""):
        section = {"kind": "lora", "rank": 4, "alpha": 6.0, "targets": targets(folder)}
        built = build_engine(make_config(folder, adapter=section), load_weights=False)
        built.wake()
        built.update_weights(read_hf(folder), policy_version=0)
        built.update_adapter(iter(factors), scale=SCALE, policy_version=0)
        built.close()


def policy_log_probs(folder: Path, sampled: Sampled) -> list[Tensor]:
    """Those of the trainer."""
    rollouts = Rollouts.of(
        [np.array(prompt, dtype=np.int32) for prompt, _, _ in sampled],
        [np.array(response, dtype=np.int32) for _, response, _ in sampled],
    )
    with single_rank():
        policy = policy_setup.load_policy(policy_setup.make_config(folder))
        found = log_probs(policy, [policy.pack(rollouts, range(len(sampled)))])
        destroy()
    return list(torch.cat(found).split([len(response) for _, response, _ in sampled]))


def worst(sampled: Sampled, expected: list[Any]) -> float:
    pairs = zip(sampled, expected, strict=True)
    return max(float(np.abs(found - np.asarray(ours)).max()) for (_, _, found), ours in pairs)


def test_the_engine_samples_with_the_policys_log_probs(
    model: Path, vllm_process: ProcessPoolExecutor
) -> None:
    sampled = vllm_process.submit(sample, model, None).result()
    assert sum(len(response) for _, response, _ in sampled) > 60
    assert np.mean(np.concatenate([found for _, _, found in sampled])) < -0.1  # no sure tokens
    difference = worst(sampled, policy_log_probs(model, sampled))
    # fp32 sums in another order: 1e-4 is seen beside log-probs of down to -40.
    assert difference < 5e-4
    shuffled = [replace_first(one) for one in sampled]
    assert worst(sampled, policy_log_probs(model, shuffled)) > 1e-2  # it can tell


def replace_first(one: tuple[list[int], list[int], np.ndarray]) -> Any:
    """With another last token of the prompt."""
    prompt, response, found = one
    return [*prompt[:-1], prompt[-1] % 50 + 3], response, found


def test_factors_beside_the_weights_are_those_of_merged_weights(
    model: Path, vllm_process: ProcessPoolExecutor
) -> None:
    hf_config = AutoConfig.from_pretrained(model)
    if hf_config.model_type == "deepseek_v3":
        pytest.skip("of latent attention vLLM gets merged weights (test_rollout_adapter.py)")
    generator = torch.Generator().manual_seed(1)
    settings = AdapterConfig(kind="lora", rank=4, alpha=6.0, targets=tuple(targets(model)))
    factors: list[Factors] = [
        (name, *(0.1 * torch.randn(*shape, generator=generator) for shape in pair))
        for name, pair in factor_shapes(settings, hf_config).items()
    ]
    if num_experts(hf_config) is not None:  # all that a CPU can tell: each reaches its layer
        vllm_process.submit(load_beside, model, factors).result()
        return
    sampled = vllm_process.submit(sample, model, factors).result()
    merged = AutoModelForCausalLM.from_pretrained(model).eval()
    base = [expected_log_probs(merged, np.array(p), np.array(r)) for p, r, _ in sampled]
    weights = dict(merged.named_parameters())
    with torch.no_grad():
        for name, a, b in factors:
            weights[f"{name}.weight"].add_(b @ a, alpha=SCALE)
    expected = [expected_log_probs(merged, np.array(p), np.array(r)) for p, r, _ in sampled]
    # Factors are added in between, see tests/rollout/test_rollout_adapter.py.
    assert worst(sampled, expected) < 1e-3
    assert worst(sampled, base) > 1e-1


def score_on_this_rank(folder: str) -> Sampled:
    """Sync an engine of all ranks, and score given tokens."""
    os.environ.update(vllm_environment(dist.get_rank(), dist.get_world_size()))
    config = make_config(Path(folder), tensor_parallel_size=dist.get_world_size())
    built = build_engine(config, load_weights=False)
    built.wake()
    built.update_weights(read_hf(folder), policy_version=0)
    random = np.random.default_rng(0)
    prompts, responses = (
        [random.integers(EOS + 1, 60, length).astype(np.int32) for _ in range(4)]
        for length in (20, 24)
    )
    scores = built.score(Rollouts.of(prompts, responses))
    return [
        (prompt.tolist(), response.tolist(), scored)
        for prompt, response, scored in zip(prompts, responses, scores, strict=True)
    ]


def test_two_ranks_of_an_engine_share_sinks_and_experts(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "gpt_oss", **SIZES, intermediate_size=192)
    for found in run_distributed(score_on_this_rank, 2, str(tmp_path / "hf")):
        assert worst(found, policy_log_probs(tmp_path / "hf", found)) < 5e-4
