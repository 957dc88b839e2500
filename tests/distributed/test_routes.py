"""Routes of experts in every layout: recorded and replayed by the ranks that compute the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import run_distributed, single_rank
from tests.distributed.policy_setup import CP, EP, PP, SP, TP, VPP
from tests.learn_setup import Report, make_judged, run_learn
from tests.routes_setup import ROLLOUTS, assert_updates, config_of, save_model

# Two mini-batches; the first has no advantage, so that its update changes no weight.
STILL = make_judged(("wwww", "cccc", "cwww", "ccww"), seed=3)
Layouts = dict[str, dict[str, Any]]
TWO: Layouts = {
    "data": {},
    "expert": {EP: 2},
    "tensor, expert": {TP: 2, SP: True, EP: 2},
    "pipeline": {PP: 2},
}
MORE: Layouts = {
    "virtual stages": {PP: 2, VPP: 2},
    "context, expert": {CP: 2, EP: 2},
}
FOUR: Layouts = {
    "4 expert": {EP: 4},
    "tensor, 4 expert": {TP: 2, SP: True, EP: 4},
    "pipeline, expert": {PP: 2, EP: 2},
    "tensor, pipeline, expert": {TP: 2, SP: True, PP: 2, EP: 2},
}
EIGHT: Layouts = {
    "pipeline, 4 expert": {PP: 2, EP: 4},
    "tensor, pipeline, 4 expert": {TP: 2, SP: True, PP: 2, EP: 4},
}
BOTH = (True, False)
Reports = dict[tuple[str, bool], Report]


def learn_everywhere(folder: Path, layouts: Layouts, ways: tuple[bool, ...]) -> Reports:
    """A step in each layout, with replay or without; at equal weights every ratio is 1.

    With replay, a stop between the two updates changes no bit.
    """
    reports = {}
    for name, sizes in layouts.items():
        for replays in ways:
            config = config_of(
                folder, replays=replays, parallel=sizes, optimizer={"weight_decay": 0.0}
            )
            whole = reports[name, replays] = run_learn(config, ROLLOUTS)
            if replays:
                stopped = run_learn(config, ROLLOUTS, stop_in=folder)
                assert stopped.metrics == whole.metrics, name
                for key, tensor in whole.after.items():
                    assert torch.equal(stopped.after[key], tensor), (name, key)
            still = run_learn(config, STILL)
            assert still.updates[0].grad_norm == 0.0
            assert set(still.updates[1].ratios.values()) <= {1.0}, name
            assert still.metrics["experts/same_routes_share"] == 1.0, name
    return reports


@pytest.mark.parametrize(
    ("world_size", "layouts", "ways"),
    [
        (2, {"tensor, expert": TWO["tensor, expert"]}, (True,)),
        pytest.param(2, TWO | MORE, BOTH, marks=pytest.mark.system),
        pytest.param(4, FOUR, BOTH, marks=pytest.mark.system),
        pytest.param(8, EIGHT, BOTH, marks=pytest.mark.system),
    ],
    ids=["one", "two", "four", "eight"],
)
def test_updates_are_those_of_a_loop_in_float64(
    tmp_path: Path, world_size: int, layouts: Layouts, ways: tuple[bool, ...]
) -> None:
    save_model(tmp_path, num_layers=4 if any(VPP in sizes for sizes in layouts.values()) else 2)
    ranks = run_distributed(learn_everywhere, world_size, tmp_path, layouts, ways)
    for replays in ways:
        config = config_of(tmp_path, replays=replays, optimizer={"weight_decay": 0.0})
        with single_rank():
            alone = run_learn(config, ROLLOUTS)
        experts = {k: v for k, v in alone.metrics.items() if k.startswith("experts/")}
        assert 0.5 < experts["experts/same_routes_share"] < 1  # there was something to replay
        for name in layouts:
            reports = [rank[name, replays] for rank in ranks]
            assert_updates(reports, tmp_path, config)
            for report in reports:  # every token of every layer counts once
                found = {k: v for k, v in report.metrics.items() if k.startswith("experts/")}
                assert found == experts, (name, replays)
