"""Pipeline ranks with several or unequal stages: their layers, and the shapes between them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from gapo_megatron.compat import cpu
from gapo_megatron.config import ParallelConfig
from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.errors import ConfigError
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.policy import destroy
from gapo_megatron.policy.pipeline import PlannedCommunicator
from tests.dist import run_distributed
from tests.distributed.policy_setup import (
    PP,
    VPP,
    WeightedLoss,
    load_policy,
    make_batch,
    make_config,
    save_model,
)
from tests.messages import mentions

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
LAYOUTS: dict[str, dict[str, Any]] = {
    "virtual": {PP: 2, VPP: 3},
    "uneven": {PP: 2, LAST: 1},
    "uneven, virtual": {PP: 2, FIRST: 4, VPP: 2},
}


def planned_shapes(folder: Path) -> list[str]:
    """Layouts in which a stage had planned every shape that its neighbours sent."""
    planned = PlannedCommunicator._communicate_shapes
    asked = P2PCommunicator._communicate_shapes
    good, num_shapes = [], 0

    def compared(
        self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        nonlocal num_shapes
        answer = planned(self, send_next, send_prev, recv_prev, recv_next)
        with cpu.device_scope():
            told = asked(self, send_next, send_prev, recv_prev, recv_next)
        assert [list(shape) for shape in answer] == [list(shape) for shape in told]
        num_shapes += recv_prev + recv_next
        return answer

    with patch.object(PlannedCommunicator, "_communicate_shapes", compared):
        for layout, sizes in LAYOUTS.items():
            num_shapes = 0
            policy, batch = load_policy(make_config(folder, parallel=sizes)), make_batch()
            shares = ((0, 1, 2), (3,), (4, 5), (6,), (7,))
            microbatches = [policy.pack(batch, indices) for indices in shares]
            log_probs(policy, microbatches)
            update(policy, microbatches, WeightedLoss(batch, microbatches))
            destroy()
            assert num_shapes > 0
            good.append(layout)
    return good


def test_every_stage_knows_the_shapes_that_it_would_be_told(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied", num_layers=6)
    for good in run_distributed(planned_shapes, 2, tmp_path):
        assert good == [*LAYOUTS]


@pytest.fixture
def first_stage(monkeypatch: pytest.MonkeyPatch) -> PlannedCommunicator:
    """The first of two stages, in a pass over two micro-batches."""
    monkeypatch.setattr("torch.distributed.get_global_rank", lambda _, rank: rank)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=None)
    return PlannedCommunicator(group, config, [(4, 1, 8), (6, 1, 8)], forward_only=True)


def test_what_is_sent_has_the_planned_shape(first_stage: PlannedCommunicator) -> None:
    with pytest.raises(AssertionError, match=mentions("activation", "(6, 1, 8)", "(4, 1, 8)")):
        first_stage._communicate_shapes(torch.zeros(6, 1, 8), None, False, False)


def test_nothing_planned_is_left(first_stage: PlannedCommunicator) -> None:
    first_stage._communicate_shapes(torch.zeros(4, 1, 8), None, False, False)
    with pytest.raises(AssertionError, match=mentions("'sent activation': 1")):
        first_stage.check_finished()


def test_nothing_travels_that_is_not_planned(first_stage: PlannedCommunicator) -> None:
    for length in (4, 6):
        first_stage._communicate_shapes(torch.zeros(length, 1, 8), None, False, False)
    with pytest.raises(AssertionError, match=mentions("received activation")):
        first_stage._communicate_shapes(None, None, True, False)
    with pytest.raises(AssertionError, match=mentions("received gradient")):
        first_stage._communicate_shapes(None, None, False, True)


def layers(num_layers: int, **sizes: int) -> list[list[list[int]]]:
    return [
        [list(stage) for stage in rank]
        for rank in layers_of_stages(ParallelConfig(**sizes), num_layers)
    ]


def test_which_layers_a_rank_has() -> None:
    assert layers(3) == [[[0, 1, 2]]]
    assert layers(4, **{PP: 2}) == [[[0, 1]], [[2, 3]]]
    assert layers(8, **{PP: 2, VPP: 2}) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert layers(7, **{PP: 3, FIRST: 2, LAST: 1}) == [[[0, 1]], [[2, 3, 4, 5]], [[6]]]
    assert layers(6, **{PP: 2, FIRST: 4, VPP: 2}) == [[[0, 1], [3, 4]], [[2], [5]]]
    assert layers(3, **{PP: 2, FIRST: 2, LAST: 1}) == [[[0, 1]], [[2]]]


@pytest.mark.parametrize(
    ("num_layers", "sizes", "named"),
    [
        (5, {PP: 2}, [f"{PP} (2)", "num_hidden_layers (5)"]),
        (6, {PP: 3, LAST: 1}, [f"{LAST} (1)", "multiple of 2", "not 5"]),
        (6, {PP: 3, FIRST: 2, LAST: 4}, [f"{FIRST} (2)", f"{LAST} (4)", "not 0"]),
        (6, {PP: 2, FIRST: 2, LAST: 3}, [f"{FIRST} (2)", f"{LAST} (3)", "multiple of 0", "not 1"]),
        (6, {PP: 2, VPP: 2}, [f"{VPP} (2)", "3 layers", "rank 0"]),
        (6, {PP: 2, LAST: 2, VPP: 4}, [f"{VPP} (4)", "2 layers", "rank 1"]),
    ],
)
def test_layers_that_cannot_be_dealt(
    num_layers: int, sizes: dict[str, int], named: list[str]
) -> None:
    with pytest.raises(ConfigError, match=mentions(*named)):
        layers(num_layers, **sizes)


@pytest.mark.parametrize("name", [VPP, FIRST, LAST])
def test_stages_need_a_pipeline(name: str) -> None:
    with pytest.raises(ValueError, match=mentions(f"{name} (2)", PP)):
        ParallelConfig(**{name: 2})
