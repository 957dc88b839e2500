"""A model whose activations exceed fp16's range is refused by name before a run begins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gapo_megatron.errors import ConfigError
from gapo_megatron.learn.checks.range_check import check_range
from gapo_megatron.learn.score import log_probs
from gapo_megatron.policy import Policy, destroy, initialize
from gapo_megatron.rollouts import Rollouts
from tests.dist import run_distributed
from tests.distributed import conversion_setup
from tests.distributed.policy_setup import (
    EP,
    PP,
    SP,
    TP,
    VPP,
    make_batch,
    make_config,
    read_weights,
    save_model,
)
from tests.messages import mentions

pytestmark = pytest.mark.usefixtures("process_group")

NUM_LAYERS = 4
BATCH = make_batch(3, vocab_size=conversion_setup.VOCAB_SIZE)
PROBE = Rollouts.of([*BATCH.prompt_ids.values()], [*BATCH.response_ids.values()])
MLP_IN_LAYER_2 = ("layers.2.mlp.gate_proj.weight", "layers.2.mlp.up_proj.weight")
LAYOUTS: dict[str, dict[str, object]] = {
    "tensor": {TP: 2, SP: True},
    "pipeline": {PP: 2},
    "virtual stages": {PP: 2, VPP: 2},
    "data": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2_tied", num_layers=NUM_LAYERS)
    return path


def build(
    folder: Path, names: tuple[str, ...] = (), *, precision: str = "fp16", **parallel: object
) -> Policy:
    """A policy whose weights with names ending in `names` are scaled by 500."""
    config = make_config(folder, model={"precision": precision}, parallel=parallel)
    policy = Policy.build(config, initialize(config.parallel), "cpu")

    def scaled() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_weights(folder):
            yield name, tensor * 500 if name.endswith(names or ("none",)) else tensor

    policy.load_hf_weights(scaled())
    return policy


@pytest.fixture(autouse=True)
def without_groups() -> Iterator[None]:
    yield
    destroy()


def test_a_model_within_the_range_passes_and_nothing_changes(folder: Path) -> None:
    policy = build(folder)
    microbatches = [policy.pack(PROBE, (i,)) for i in range(3)]
    before = log_probs(policy, microbatches)
    check_range(policy, PROBE)
    check_range(policy, Rollouts.of([], []))
    after = log_probs(policy, microbatches)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not watched(policy)


def watched(policy: Policy) -> bool:
    """Whether any hook is left on its modules."""
    modules = [module for stage in policy.stages for module in stage.modules()]
    return any(module._forward_hooks for module in modules)


def refusal(policy: Policy) -> str:
    with pytest.raises(ConfigError) as caught:
        check_range(policy, PROBE)
    assert not watched(policy)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (MLP_IN_LAYER_2, "layer 2, mlp.linear_fc2"),
        (
            ("layers.1.self_attn.v_proj.weight", "layers.1.self_attn.o_proj.weight"),
            "layer 1, self_attention.linear_proj",
        ),
    ],
)
def test_the_first_module_that_overflows_is_named(
    folder: Path, names: tuple[str, ...], place: str
) -> None:
    message = refusal(build(folder, names))
    assert re.search(mentions("model.precision ('fp16')", place, "65504", "bf16", "fp32"), message)
    destroy()
    policy = build(folder, names, precision="bf16")
    (values,) = log_probs(policy, [policy.pack(PROBE, (0, 1, 2))])
    assert values is not None and values.isfinite().all()


def refused_in_every_layout(dense: Path, experts: Path) -> tuple[dict[str, str], str]:
    found = {}
    for name, parallel in LAYOUTS.items():
        found[name] = refusal(build(dense, MLP_IN_LAYER_2, **parallel))
        destroy()
    policy = build(experts, ("experts.3.up_proj.weight", "experts.3.gate_proj.weight"), **{EP: 2})
    message = refusal(policy)
    destroy()
    return found, message


def test_every_layout_and_every_rank_names_the_same_module(folder: Path, tmp_path: Path) -> None:
    conversion_setup.save_model(tmp_path, "qwen3_moe")
    expected = refusal(build(folder, MLP_IN_LAYER_2))
    results = run_distributed(refused_in_every_layout, 2, folder, tmp_path)
    for found, with_experts in results:
        assert found == dict.fromkeys(LAYOUTS, expected)
        # The last expert is on rank 1 alone.
        assert with_experts == results[0][1] and "layer 0, mlp.experts" in with_experts
