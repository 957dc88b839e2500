"""The probe of a weight sync, and what the engine is asked to agree with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.policy import Policy, destroy, initialize
from gapo_megatron.rollout import sync as weight_sync
from gapo_megatron.rollout.sync import first_sequences, prompts_as_sequences, sync
from gapo_megatron.rollout.vllm import WeightCheck
from gapo_megatron.types import Prompt
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import (
    make_batch,
    make_config,
    read_weights,
    reference_log_probs,
    save_model,
)


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(str(n), tuple(range(n)), answer="") for n in lengths]


def test_probes_are_short() -> None:
    batch = make_batch(8)
    batch.response_ids[1] = np.arange(1000, dtype=np.int32)
    probe = first_sequences(batch, 3)
    assert [len(ids) for ids in probe.response_ids] == [
        len(batch.response_ids[0]),
        256,
        len(batch.response_ids[2]),
    ]
    assert all(a is b for a, b in zip(probe.prompt_ids, batch.prompt_ids[:3], strict=True))

    probe = prompts_as_sequences(prompts(1, 5, 1000, 2, 3), 3)
    assert [ids.tolist() for ids in probe.prompt_ids] == [[0]] * 3
    assert [len(ids) for ids in probe.response_ids] == [4, 256, 1]
    assert probe.response_ids[0].tolist() == [1, 2, 3, 4]


class Asked(list):
    """Stands in for the engine's half of a sync; holds what it was given, in order."""

    def take(
        self, engine: Any, weights: Any, *, policy_version: int, on_received: Callable[[], None]
    ) -> None:
        self.append((policy_version, sorted(name for name, _ in weights)))
        on_received()

    def compare(self, engine: Any, prompts: Any, responses: Any, log_probs: Any) -> WeightCheck:
        self.append(log_probs)
        return WeightCheck(0.0, 0.0)


def sync_with_nothing(folder: Path, parallel: dict[str, int]) -> list[Any]:
    config = make_config(
        folder,
        parallel=parallel,
        rollout={"temperature": 0.5},
        optimizer={"offload": "all"},
    )
    policy = Policy.build(config, initialize(config.parallel), "cpu")
    policy.load_hf_weights(read_weights(folder))
    asked = Asked()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sync, "sync_weights", asked.take)
        patch.setattr(weight_sync, "verify_weights", asked.compare)
        engine: Any = SimpleNamespace(gloo_group=dist.group.WORLD)
        sync(policy, engine, first_sequences(make_batch(), 3), policy_version=7)
        (buffer,) = policy.model[0].buffers
        for data in (buffer.grad_data, buffer.param_data):
            assert data.untyped_storage().nbytes() == 0  # while the engine generates
        sync(policy, engine, prompts_as_sequences(prompts(1, 1), 3), policy_version=8)
    destroy()
    return list(asked)


def check(asked: Sequence[Any], folder: Path, expected: Sequence[torch.Tensor]) -> None:
    names = sorted(name for name, _ in read_weights(folder))
    (first, log_probs, second, nothing) = asked
    assert first == (7, names) and second == (8, names) and nothing == []
    for found, wanted in zip(log_probs, expected, strict=True):
        # fp32 rounding in another order, as in test_policy_one_rank.
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_the_engine_must_agree_with_the_model_at_temperature_one(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen2_tied")
    expected = reference_log_probs(model, first_sequences(make_batch(), 3))
    with single_rank():
        check(sync_with_nothing(tmp_path, {}), tmp_path, expected)
    # The head is on the last rank; the first needs its log-probs too.
    parallel = {"pipeline_model_parallel_size": 2}
    for asked in run_distributed(sync_with_nothing, 2, tmp_path, parallel):
        check(asked, tmp_path, expected)
