"""A policy with an adapter: trains low-rank updates around attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.policy import ParallelGroups, Policy
from gapo_megatron.policy.load import load_sharded
from gapo_megatron.policy.optimizer import inner_optimizers
from tests.distributed.checkpoint_setup import write_state
from tests.distributed.conversion_setup import convert
from tests.distributed.policy_setup import (
    WeightedLoss,
    copies,
    make_batch,
    make_config,
    pack_all,
    read_weights,
    save_model,
)

BATCH = make_batch()
MICROBATCHES = pack_all(BATCH, ((0, 1, 2, 3, 4), (5, 6, 7)))
RANK = 3


class LowRankLinear(nn.Module):
    """y = (W + up down) x, of a Megatron-core linear W [out, in] on one tensor parallel rank."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        weight = base.weight
        self.down = nn.Parameter(torch.randn(RANK, weight.shape[1], dtype=weight.dtype) * 0.1)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], RANK, dtype=weight.dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = self.base(x)
        return output + x @ self.down.T @ self.up.T, bias

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: Any, metadata: Any = None
    ) -> dict[str, Any]:
        own = {"down": self.down, "up": self.up}
        return {
            **self.base.sharded_state_dict(f"{prefix}base.", sharded_offsets, metadata),
            **make_sharded_tensors_for_checkpoint(own, prefix, {}, sharded_offsets),
        }


class LowRank:
    """Trains low-rank updates of query, key, value and projection; all else is frozen."""

    def attach(self, stage: nn.Module) -> None:
        torch.manual_seed(1)
        stage.requires_grad_(False)
        for layer in stage.decoder.layers:
            attention = layer.self_attention
            attention.linear_qkv = LowRankLinear(attention.linear_qkv)
            attention.linear_proj = LowRankLinear(attention.linear_proj)

    def base_name(self, name: str) -> str | None:
        return None if name.endswith((".down", ".up")) else name.replace(".base.", ".")

    def merge(self, stage: nn.Module, name: str, weight: Tensor) -> Tensor:
        if not name.endswith(".base.weight"):
            return weight
        linear = stage.get_submodule(name.removesuffix(".base.weight"))
        return weight + linear.up.detach() @ linear.down.detach()

    def switched_off(self) -> None:
        """None: a reference is a copy."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2_untied")
    return path


def build(folder: Path, groups: ParallelGroups, **sections: dict[str, object]) -> Policy:
    return Policy.build(make_config(folder, **sections), groups, "cpu", adapter=LowRank())


def loaded(folder: Path, groups: ParallelGroups, **sections: dict[str, object]) -> Policy:
    policy = build(folder, groups, **sections)
    policy.load_hf_weights(read_weights(folder))
    return policy


def train(policy: Policy) -> None:
    update(policy, MICROBATCHES, WeightedLoss(BATCH, MICROBATCHES))


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_the_adapter_is_trained_and_it_is_merged_on_export(
    folder: Path, groups: ParallelGroups
) -> None:
    policy = loaded(folder, groups)
    start = copies(policy)
    assert changed(dict(read_weights(folder)), start) == set()
    own = [p for name, p in policy.stages[0].named_parameters() if name.endswith((".down", ".up"))]
    (adam,) = inner_optimizers(policy.optimizer)
    masters = [p for group in adam.param_groups for p in group["params"]]
    assert sum(p.numel() for p in masters) == sum(p.numel() for p in own)

    names = [name for name, _ in policy.stages[0].named_parameters()]
    before = {n: p.detach().clone() for n, p in policy.stages[0].named_parameters()}
    for _ in range(3):
        train(policy)
    moved = changed(before, dict(policy.stages[0].named_parameters()))
    assert moved == {name for name in names if name.endswith((".down", ".up"))}

    after = copies(policy)
    parts = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    assert changed(start, after) == {name for name in start if name.endswith(parts)}
    plain = Policy.build(make_config(folder), groups, "cpu")
    plain.load_hf_weights(after.items())
    ours, theirs = (torch.cat(log_probs(one, MICROBATCHES)) for one in (policy, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # fp32: (W + BA) x, W x + B A x
    plain.load_hf_weights(start.items())
    assert (ours - torch.cat(log_probs(plain, MICROBATCHES))).abs().max() > 1e-3


def test_a_megatron_folder_fills_the_weights_beneath(
    folder: Path, groups: ParallelGroups, tmp_path: Path
) -> None:
    convert(folder, tmp_path / "megatron")
    policy = build(folder, groups)
    policy.load_megatron_weights(tmp_path / "megatron")
    assert changed(dict(read_weights(folder)), copies(policy)) == set()


def test_the_reference_is_the_model_without_what_was_trained(
    folder: Path, groups: ParallelGroups
) -> None:
    policy = loaded(folder, groups, objective={"kl_coef": 0.1}, optimizer={"offload": "all"})
    start = copies(policy)
    train(policy)
    policy.make_room()
    policy.make_room_of_weights()
    after = copies(policy)
    with policy.reference_weights():
        assert changed(start, copies(policy)) == set()
    assert changed(after, copies(policy)) == set()
    assert changed(start, after)


def test_a_checkpoint_resumes_with_the_same_bits(
    folder: Path, groups: ParallelGroups, tmp_path: Path
) -> None:
    policy, resumed = loaded(folder, groups), loaded(folder, groups)
    train(policy)
    (tmp_path / "saved").mkdir()
    saved, gather = policy.sharded_state_dict(), policy.gather_optimizer_state
    write_state(saved, tmp_path / "saved", groups, gather=gather)
    state = load_sharded(resumed.sharded_state_dict(is_loading=True), tmp_path / "saved")
    resumed.load_state_dict(state)
    assert changed(copies(policy), copies(resumed)) == set()
    train(policy), train(resumed)
    assert changed(copies(policy), copies(resumed)) == set()
    assert resumed.num_updates == 2
