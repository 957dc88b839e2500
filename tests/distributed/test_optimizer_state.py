"""A checkpoint assigns optimizer state correctly, for any split and padding of buffers."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from gapo_megatron.compat import megatron_optimizer
from gapo_megatron.compat.megatron_version import version
from gapo_megatron.config import Config, counts
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import Policy, destroy, initialize, optimizer
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.state import loaded_bytes, state_bytes
from tests.dist import run_distributed
from tests.distributed import conversion_setup
from tests.distributed.checkpoint_setup import save, tensors_on_disk
from tests.distributed.policy_setup import load_policy, make_config, save_model
from tests.messages import mentions

# Model, parallel settings and bucket size, which counts with the overlap alone.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    # Over stages the tied embedding has a bucket of its own.
    "tied": ("qwen2_tied", {"pipeline_model_parallel_size": 2}, 1),
    "many buckets": ("qwen2_tied", {"overlap_grad_reduce": True}, 1),
    "experts": ("qwen3_moe", {"expert_model_parallel_size": 2, "overlap_grad_reduce": True}, 9000),
}
GATHERED_AT_ONCE = 1000
FACTORS = {"param": 1.0, "exp_avg": 2.0, "exp_avg_sq": 0.5}  # of the weights, exact in binary


def build(folder: Path, name: str) -> tuple[Config, Policy]:
    model, parallel, bucket_size = CASES[name]
    config = make_config(folder / model, parallel=parallel)
    groups = initialize(config.parallel)
    with patch.object(counts, "bucket_size", lambda _: bucket_size):
        policy = load_policy(config, groups)
    return config, policy


def host_bytes(policy: Policy) -> int:
    """Optimizer state on this rank's host during a load."""
    return sum(
        tensor.nbytes
        for part in megatron_optimizer.parts(policy.optimizer)
        for by_dtype in part.get_parameter_state_dp_zero(empty_data=True).values()
        for state in by_dtype.values()
        for tensor in state.values()
    )


def predicted_bytes(config: Config, policy: Policy) -> int:
    layout = Layout.of(config, world_size=policy.groups.world_size)
    of_stages = state_bytes(rules_for(policy.hf_config), config, layout)
    _, gradients, _ = of_stages[policy.groups.pp_rank]
    return loaded_bytes(gradients, config.model.precision)


def write(folder: Path, run_dir: Path) -> list[int]:
    """A checkpoint of each case; returns the sizes of what was gathered."""
    gathered: list[int] = []
    all_gather = dist.all_gather_into_tensor

    def watched(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.append(output.numel())
        return all_gather(output, *args, **kwargs)

    for name in CASES:
        config, policy = build(folder, name)
        parts = optimizer.inner_optimizers(policy.optimizer)
        buffers = [
            buffer
            for stage in policy.model
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers)
        ]
        padded = [buffer.numel - sum(one.numel() for one in buffer.params) for buffer in buffers]
        assert max(padded) > 0, name
        predicted = predicted_bytes(config, policy) + 12 * sum(padded)
        assert host_bytes(policy) == predicted, name
        for part in parts:
            for weight, state in part.state.items():
                state["exp_avg"].copy_(2 * weight)
                state["exp_avg_sq"].copy_(weight / 2)
        with (
            patch.object(megatron_optimizer, "_GATHERED_AT_ONCE", GATHERED_AT_ONCE),
            patch.object(dist, "all_gather_into_tensor", watched),
        ):
            save(run_dir / name, policy, config, step=1)
        destroy()
    return gathered


def read(run_dir: Path) -> dict[str, dict[str, Tensor]]:
    return {
        path.name: tensors_on_disk(next(path.glob("checkpoints/step_*")))
        for path in sorted(run_dir.iterdir())
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "qwen2_tied", "qwen2_tied", num_layers=4)
    conversion_setup.save_model(folder / "qwen3_moe", "qwen3_moe")
    return folder


def test_state_lies_with_its_weight(folder: Path, tmp_path: Path) -> None:
    for gathered in run_distributed(write, 4, folder, tmp_path):
        assert max(gathered) <= GATHERED_AT_ONCE < 10 * len(gathered)
    (found,) = run_distributed(read, 1, tmp_path)
    for name in CASES:
        tensors = found[name]
        weights = {key for key in tensors if not key.startswith("optimizer.")}
        assert weights, name
        for key in weights:
            for part, factor in FACTORS.items():
                state = tensors[f"optimizer.state.{part}.{key}"]
                assert torch.equal(state, factor * tensors[key]), f"{name}: {part} of {key}"


Look = Callable[..., dict[int, Any]]


def without_padding(look_up: Look) -> Look:
    """As in Megatron-core's pull request 5077: minus the padding of earlier buckets."""

    def wrapped(part: Any, *args: Any, **kwargs: Any) -> dict[int, Any]:
        with ExitStack() as undo:
            for buffer in part.buffers:
                moved = dict(buffer.param_index_map)
                padding = 0
                for bucket in buffer.buckets:
                    for parameter in bucket.params_list:
                        start, end, number = moved[parameter]
                        moved[parameter] = (start - padding, end - padding, number)
                    padding += bucket.grad_data.numel() - bucket.numel_unpadded
                undo.enter_context(patch.object(buffer, "param_index_map", moved))
            return look_up(part, *args, **kwargs)

    return wrapped


def build_with_another_look_up(folder: Path) -> dict[int, str]:
    method = "sharded_param_state_fully_reshardable"
    changed = without_padding(getattr(distrib_optimizer.DistributedOptimizer, method))
    config = make_config(folder / "qwen2_tied", parallel={"overlap_grad_reduce": True})
    groups = initialize(config.parallel)
    refused = {}
    for bucket_size in (1, 10**9):
        with (
            patch.object(counts, "bucket_size", lambda _, size=bucket_size: size),
            patch.object(distrib_optimizer.DistributedOptimizer, method, changed),
        ):
            refused[bucket_size] = "nothing"
            try:
                Policy.build(config, groups, "cpu")
            except ConfigError as error:
                refused[bucket_size] = str(error)
    return refused


def test_a_megatron_core_that_reads_elsewhere_is_refused(folder: Path) -> None:
    """With one bucket no padding lies between buckets, and nothing is read from elsewhere."""
    (refused,) = run_distributed(build_with_another_look_up, 1, folder)
    assert re.search(mentions("megatron-core", version(), "0.19.2"), refused[1])
    assert refused[10**9] == "nothing"
