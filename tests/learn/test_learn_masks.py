"""`learn` with tokens appended by an environment: they are context, and count nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gapo_megatron.rollouts import Rollouts
from tests.learn_setup import (
    Report,
    assert_update,
    carry_some,
    expected_update,
    load_model,
    make_config,
    make_judged,
    mask_some,
    minibatches,
    put_in_masked,
    run_learn,
)

pytestmark = pytest.mark.usefixtures("process_group")

OBJECTIVE = {"method": "gapo", "importance_weight_max": 1.05}


@pytest.fixture(scope="module")
def rollouts(folder: Path) -> Rollouts:
    """Every second rollout is carried, fully or partly; two of three have masked tokens."""
    return carry_some(mask_some(make_judged()), make_config(folder))


def step(folder: Path, rollouts: Rollouts, **options: Any) -> Report:
    return run_learn(make_config(folder, objective=OBJECTIVE), rollouts, **options)


@pytest.fixture(scope="module")
def report(folder: Path, rollouts: Rollouts) -> Report:
    return step(folder, rollouts)


def assert_same_bits(found: Report, expected: Report) -> None:
    assert found.metrics == expected.metrics
    assert all(torch.equal(found.after[name], weight) for name, weight in expected.after.items())


def test_only_sampled_tokens_are_learned_from(
    folder: Path, rollouts: Rollouts, report: Report
) -> None:
    """Ratios, weights, losses and gradients of a float64 loop that skips appended tokens."""
    config, old = make_config(folder, objective=OBJECTIVE), load_model(folder)
    assert rollouts.num_sampled < sum(map(len, rollouts.response_ids.values()))
    for number, (update, part) in enumerate(
        zip(report.updates, minibatches(rollouts), strict=True)
    ):
        model = load_model(folder, update.weights)
        expected = expected_update(model, part, old=old, config=config)
        assert_update(update, expected, start=number * len(part))


def test_what_stands_at_a_masked_token_is_never_read(
    folder: Path, rollouts: Rollouts, report: Report
) -> None:
    assert_same_bits(step(folder, put_in_masked(rollouts, -7.5)), report)
