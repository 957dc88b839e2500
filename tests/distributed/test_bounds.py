"""Bounds computed by a mini-batch are the same for every layout and packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.learn import loss as loss_module
from gapo_megatron.learn import step as step_module
from gapo_megatron.learn.checks import bounds as bounds_module
from gapo_megatron.objective import PolicyLoss, make_batch
from gapo_megatron.policy import destroy
from gapo_megatron.rollouts import Rollouts
from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import copies, load_policy, save_model
from tests.learn_setup import NUM_MINIBATCHES, carry_some, make_config, make_judged, planned

LAYOUTS: dict[str, dict[str, object]] = {
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "data": {},
}
OBJECTIVES = (
    {"method": "m2po", "second_moment_max": 1e-4},
    {"method": "bapo", "positive_share_min": 0.45},
)
Found = dict[str, Any]


def config_of(folder: Path, objective: dict[str, Any], *, tokens: int = 48, **sizes: Any) -> Config:
    batch = {"max_tokens_per_microbatch": tokens}
    # Far steps: the budgets are exceeded, and bounds bind.
    optimizer = {"learning_rate": 3e-3}
    return make_config(
        folder, objective=objective, batch=batch, parallel=sizes, optimizer=optimizer
    )


def learn_once(config: Config, rollouts: Rollouts) -> Found:
    """One step on this rank: widths, losses, clipping, metrics, weights."""
    policy = load_policy(config)
    batch = make_batch(rollouts, config.objective.resolve())
    batch = planned(batch, config, data_parallel_size=policy.groups.dp_size)
    found: Found = {"widths": [], "passes": 0, "lost": 0, "gradient": []}
    find_widths, policy_loss = step_module.find_widths, loss_module.policy_loss
    log_probs = bounds_module.log_probs

    def watched_widths(*args: Any) -> Any:
        found["widths"].append(find_widths(*args))
        return found["widths"][-1]

    def watched_pass(*args: Any, **options: Any) -> Any:
        found["passes"] += 1
        return log_probs(*args, **options)

    def watched_loss(values: torch.Tensor, *args: Any, **kwargs: Any) -> PolicyLoss:
        result = policy_loss(values, *args, **kwargs)
        if len(values) and result.clipped.any():
            (gradient,) = torch.autograd.grad(result.loss, values, retain_graph=True)
            found["gradient"].append(float(gradient[result.clipped].abs().sum()))
            found["lost"] += int(result.clipped.sum())
        return result

    with (
        patch.object(step_module, "find_widths", watched_widths),
        patch.object(bounds_module, "log_probs", watched_pass),
        patch.object(loss_module, "policy_loss", watched_loss),
    ):
        metrics = step_module.learn(policy, batch, config.objective, config.rollout, Stopwatch())
    assert metrics is not None
    found |= {"metrics": metrics, "scores": policy.groups.is_last_stage}
    found["after"] = copies(policy)
    destroy()
    return found


def in_every_layout(folder: Path, objective: dict[str, Any], rollouts: Rollouts) -> list[Found]:
    configs = [config_of(folder, objective, **sizes) for sizes in LAYOUTS.values()]
    return [learn_once(config, rollouts) for config in configs]


def assert_same(found: Found, expected: Found, name: str) -> None:
    for ours, theirs in zip(found["widths"], expected["widths"], strict=True):
        # Float32 log-probs of order 5, each to about 1e-6, and two of them in a ratio.
        assert ours == pytest.approx(theirs, abs=2e-5), name
    for key in ("loss/policy", "clip/bound_low", "clip/bound_high", "clip/fraction_tokens"):
        assert found["metrics"][key] == pytest.approx(expected["metrics"][key], abs=2e-5), name


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["m2po", "bapo"])
@pytest.mark.parametrize("is_carried", [False, True], ids=["new", "carried"])
def test_bounds_are_those_of_one_rank(
    tmp_path: Path, objective: dict[str, Any], is_carried: bool
) -> None:
    save_model(tmp_path, "qwen2_tied")
    config = config_of(tmp_path, objective)
    rollouts = make_judged(seed=1)
    if is_carried:
        rollouts = carry_some(rollouts, config)
    with single_rank():
        expected = learn_once(config, rollouts)
        others = [config_of(tmp_path, objective, tokens=n) for n in (32, 4096)]
        packed = [learn_once(other, rollouts) for other in others]
    # The first mini-batch is not scored where no weight has moved since its old log-probs.
    num_found = NUM_MINIBATCHES if is_carried else NUM_MINIBATCHES - 1
    assert expected["passes"] == len(expected["widths"]) == num_found
    assert any(widths is not None for widths in expected["widths"])
    assert expected["lost"] and not any(expected["gradient"])
    found = [widths for widths in expected["widths"] if widths is not None]
    low, high = (sum(column) / len(found) for column in zip(*found, strict=True))
    assert expected["metrics"]["clip/bound_low"] == pytest.approx(1 - low)
    assert expected["metrics"]["clip/bound_high"] == pytest.approx(1 + high)
    for one in packed:
        assert_same(one, expected, "packing")
    ranks = run_distributed(in_every_layout, 2, tmp_path, objective, rollouts)
    for name, first, second in zip(LAYOUTS, *ranks, strict=True):
        assert first["metrics"] == second["metrics"], name
        scored = [one for one in (first, second) if one["scores"]]
        assert len(scored) == (1 if name == "pipeline" else 2)
        assert scored[0]["widths"] == scored[-1]["widths"], name  # to the bit
        assert first["passes"] == second["passes"] == num_found, name
        for one in scored:
            assert_same(one, expected, name)


@pytest.mark.parametrize("method", ["gapo_token", "dapo"])
def test_fixed_widths_cost_no_pass(tmp_path: Path, method: str) -> None:
    save_model(tmp_path, "qwen2_tied")
    with single_rank():
        found = learn_once(config_of(tmp_path, {"method": method}), make_judged(seed=1))
    assert found["passes"] == 0 and "clip/bound_low" not in found["metrics"]
