"""A weight sync with a second engine: probe and verification."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from gapo_megatron.config.methods import METHODS
from gapo_megatron.errors import WeightSyncError
from gapo_megatron.policy import Policy, destroy
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.sync import first_sequences, prompts_as_sequences, sync
from gapo_megatron.rollout.verify import WeightCheck, verify_weights
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Prompt
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import (
    load_policy,
    make_batch,
    make_config,
    save_model,
)
from tests.factors_engine import FactorsEngine
from tests.scripted_engine import ScriptedEngine
from tests.transformers_engine import TransformersEngine


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(str(n), tuple(range(n)), answer="") for n in lengths]


def test_probes_are_short() -> None:
    batch = make_batch(8)
    batch.response_ids[1] = np.arange(1000, dtype=np.int32)
    probe = first_sequences(batch, 3)
    assert [len(ids) for ids in probe.response_ids.values()] == [
        len(batch.response_ids[0]),
        256,
        len(batch.response_ids[2]),
    ]
    assert all(probe.prompt_ids[i] is batch.prompt_ids[i] for i in range(3))

    probe = prompts_as_sequences(prompts(1, 5, 1000, 2, 3), 3)
    assert [ids.tolist() for ids in probe.prompt_ids.values()] == [[0]] * 3
    assert [len(ids) for ids in probe.response_ids.values()] == [4, 256, 1]
    assert probe.response_ids[0].tolist() == [1, 2, 3, 4]


def make_engine(folder: Path) -> TransformersEngine:
    """Engine on every rank, asleep, with other weights than those of the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    replicas = Replicas.create(1, gloo_group=dist.group.WORLD)
    engine = TransformersEngine(model, eos_token_id=0, replicas=replicas, verify_bound=1e-5)
    engine.sleep()
    return engine


def make_policy(folder: Path, **sections: Any) -> Policy:
    config = make_config(folder, rollout={"temperature": 0.5}, **sections)
    return load_policy(config)


def sync_with_a_second_engine(folder: Path, parallel: dict[str, int]) -> list[WeightCheck]:
    policy = make_policy(folder, parallel=parallel, optimizer={"offload": "all"})
    engine = make_engine(folder)
    probe = first_sequences(make_batch(), 3)
    checks = [sync(policy, engine, probe, policy_version=7)]
    assert engine.policy_version == 7
    (buffer,) = policy.model[0].buffers
    for data in (buffer.grad_data, buffer.param_data):
        assert data.untyped_storage().nbytes() == 0  # while the engine generates
    nothing = prompts_as_sequences(prompts(1, 1), 3)
    checks.append(sync(policy, engine, nothing, policy_version=8))
    engine.update_weights = partial(damaged, engine.update_weights)  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"\bversion 9\b"):
        sync(policy, engine, probe, policy_version=9)
    destroy()
    return checks


def damaged(
    update_weights: Callable[..., None], weights: Iterable[tuple[str, Tensor]], **settings: Any
) -> None:
    """A single element of a matrix, on the last rank only."""
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if is_last and name.endswith("layers.1.mlp.up_proj.weight"):
                tensor = tensor.clone()
                tensor[0] += 10
            yield name, tensor

    update_weights(tensors(), **settings)


def check(checks: Sequence[WeightCheck]) -> None:
    first, nothing = checks
    # Temperature 1 on both sides; fp32 rounding in another order, as in test_policy_one_rank.
    assert 0 < first.mean_abs_diff <= first.max_abs_diff < 1e-5
    assert (nothing.mean_abs_diff, nothing.max_abs_diff) == (0, 0)


def test_the_ratio_that_rounding_gives_is_a_mean_over_sequences() -> None:
    """Of |exp(D) - 1|: opposite differences of a sequence's tokens cancel, those of two do not."""

    class Scores(ScriptedEngine):
        def score(self, rollouts: Rollouts) -> list[np.ndarray]:
            return [np.array(values, np.float32) for values in ([-1, -2], [-1], [-3, -1])]

    ids = [np.array([4, 5], np.int32), np.array([4], np.int32), np.array([4, 5], np.int32)]
    trainer = [np.array(values) for values in ([-0.9, -2.1], [-0.98], [-3.05, -1.01])]
    engine = Scores(lambda request: [])
    engine.verify_bound = 0.2
    check = verify_weights(engine, Rollouts.of(ids, ids), trainer)
    deviation = (0 + math.expm1(0.02) + abs(math.expm1(-0.03))) / 3
    assert check.ratio_deviation == pytest.approx(deviation)
    gapo, cispo = METHODS["gapo"], METHODS["cispo"]
    assert check.metrics(gapo)["sync/ratio_deviation_share"] == pytest.approx(
        deviation / gapo.eps_low
    )
    assert not cispo.is_band and "sync/ratio_deviation_share" not in check.metrics(cispo)
    assert check.metrics(cispo)["sync/ratio_deviation"] == check.ratio_deviation


def test_the_engine_must_agree_with_the_model_at_temperature_one(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    with single_rank():
        check(sync_with_a_second_engine(tmp_path, {}))
    # The head is on the last rank; the first needs its log-probs too.
    parallel = {"pipeline_model_parallel_size": 2}
    for checks in run_distributed(sync_with_a_second_engine, 2, tmp_path, parallel):
        check(checks)


def sync_an_adapter(folder: Path, parallel: dict[str, int]) -> list[WeightCheck]:
    """Policy and engine compute W x + scale * B A x; then a second engine gets merged weights."""
    policy = make_policy(folder, parallel=parallel, adapter={"kind": "lora", "rank": 4})
    replicas = Replicas.create(1, gloo_group=dist.group.WORLD)
    other = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    engine = FactorsEngine(other, rank=4, replicas=replicas)
    probe, checks = first_sequences(make_batch(), 3), []
    for version in range(2):
        randomise(policy, seed=version)
        checks.append(sync(policy, engine, probe, policy_version=version))
    assert engine.received == ["weights", "factors", "factors"]
    engine._forgets = True
    randomise(policy, seed=2)
    with pytest.raises(WeightSyncError, match=r"\bversion 2\b"):
        sync(policy, engine, probe, policy_version=2)
    checks.append(sync(policy, make_engine(folder), probe, policy_version=3))
    destroy()
    return checks


@torch.no_grad()
def randomise(policy: Policy, seed: int) -> None:
    """Give every factor B values of its own, the same on every rank that holds it."""
    for stage in policy.stages:
        for name, factor in stage.named_parameters():
            if name.endswith("lora_b"):
                generator = torch.Generator().manual_seed(seed + sum(factor.shape))
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("parallel", [{}, {"tensor_model_parallel_size": 2}])
def test_an_adapter_is_synced_beside_its_base(tmp_path: Path, parallel: dict[str, int]) -> None:
    save_model(tmp_path, "qwen2_tied")
    for first, second, merged in run_distributed(
        sync_an_adapter, 1 + len(parallel), tmp_path, parallel
    ):
        for one in (first, second):
            assert 0 < one.max_abs_diff < 1e-5 and one.merge_rounding is None
        assert 0 < merged.max_abs_diff < 1e-5 and 0 < merged.merge_rounding < 1e-5
