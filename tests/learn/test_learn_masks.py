"""`learn` with responses of which an environment gave a part: it is read, and counts nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gapo_megatron.types import Group
from tests.batches import make_batch
from tests.dist import single_rank
from tests.distributed.policy_setup import save_model
from tests.learn_setup import (
    GROUP_SIZE,
    NUM_MINIBATCHES,
    Report,
    carry_some,
    expected_update,
    load_model,
    make_config,
    make_groups,
    mask_some,
    put_in_masked,
    run_learn,
)

OBJECTIVE = {"method": "gapo", "importance_weight_max": 1.05}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with single_rank():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2_tied")
    return path


@pytest.fixture(scope="module")
def groups(folder: Path) -> list[Group]:
    """Of two rollouts one is carried, wholly or in part; of three two have masked tokens."""
    return mask_some(carry_some(make_groups(), make_config(folder)))


def step(folder: Path, groups: Sequence[Group], **options: Any) -> Report:
    config = make_config(folder, objective=OBJECTIVE)
    return run_learn(config, groups, num_minibatches=NUM_MINIBATCHES, **options)


@pytest.fixture(scope="module")
def report(folder: Path, groups: list[Group]) -> Report:
    return step(folder, groups)


def assert_same_bits(found: Report, expected: Report) -> None:
    assert found.metrics == expected.metrics
    assert all(torch.equal(found.after[name], weight) for name, weight in expected.after.items())


def test_only_sampled_tokens_are_learned_from(
    folder: Path, groups: list[Group], report: Report
) -> None:
    """Ratios, weights, losses and gradients of a float64 loop that skips the others."""
    config, old = make_config(folder, objective=OBJECTIVE), load_model(folder)
    batch = make_batch(groups, config.objective.resolve())
    assert batch.num_response_tokens.sum() < sum(map(len, batch.response_ids))
    for number, (update, part) in enumerate(
        zip(report.updates, (groups[:5], groups[5:]), strict=True)
    ):
        model = load_model(folder, update.weights)
        expected = expected_update(model, part, old=old, config=config)
        assert update.loss == pytest.approx(expected.loss, abs=2e-7)
        start = number * len(part) * GROUP_SIZE
        assert {i - start for i in update.ratios} == expected.ratios.keys()
        for position, ratio in expected.ratios.items():
            assert update.ratios[start + position] == pytest.approx(ratio, rel=1e-5)
            assert update.clipped[start + position] == expected.clipped[position]
        for name, whole in expected.gradients.items():
            # As in test_learn: float32 against float64.
            error = (update.gradients[name].double() - whole).norm()
            assert error <= 1e-5 * whole.norm(), (number, name)


def test_what_stands_at_a_masked_token_is_never_read(
    folder: Path, groups: list[Group], report: Report
) -> None:
    other = [
        replace(
            group,
            rollouts=tuple(put_in_masked(one, one.is_sampled, -7.5) for one in group.rollouts),
        )
        for group in groups
    ]
    assert_same_bits(step(folder, other), report)


def test_masks_of_sampled_tokens_alone_change_no_bit(folder: Path) -> None:
    groups = carry_some(make_groups(), make_config(folder))
    all_sampled = [
        replace(
            group,
            rollouts=tuple(
                replace(one, response_mask=np.ones(len(one.token_ids), dtype=bool))
                for one in group.rollouts
            ),
        )
        for group in groups
    ]
    assert_same_bits(step(folder, all_sampled), step(folder, groups))


def test_a_stop_changes_no_bit(
    folder: Path, groups: list[Group], report: Report, tmp_path: Path
) -> None:
    assert_same_bits(step(folder, groups, stop_in=tmp_path), report)
