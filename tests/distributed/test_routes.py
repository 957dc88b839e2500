"""Routes of experts in every layout: recorded and replayed by the ranks that compute the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gapo_megatron.rollouts import Rollouts
from tests.dist import SOAK, run_distributed, single_rank
from tests.distributed.policy_setup import CP, EP, PP, SP, TP, VPP
from tests.learn_setup import Report, make_judged, run_learn
from tests.routes_setup import (
    ROLLOUTS,
    assert_updates,
    config_of,
    save_model,
    with_engines_routes,
)

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
FREE: Layouts = {name: (TWO | MORE)[name] for name in ("tensor, expert", "context, expert")}
REPLAYS = ("trainer", "rollout")
Reports = dict[tuple[str, str], Report]


def learn_everywhere(folder: Path, layouts: Layouts, ways: Sequence[str]) -> Reports:
    """A step in each layout, with each kind of replay; at equal weights every ratio is 1.

    With replay, a stop between the two updates changes no bit.
    """
    reports = {}
    for name, sizes in layouts.items():
        for replayed in ways:
            config = config_of(
                folder, replayed=replayed, parallel=sizes, optimizer={"weight_decay": 0.0}
            )
            rollouts = of_engine(ROLLOUTS, layouts) if replayed == "rollout" else ROLLOUTS
            whole = reports[name, replayed] = run_learn(config, rollouts)
            if replayed != "none":
                stopped = run_learn(config, rollouts, stop_in=folder)
                assert stopped.metrics == whole.metrics, name
                for key, tensor in whole.after.items():
                    assert torch.equal(stopped.after[key], tensor), (name, key)
            still = STILL if replayed != "rollout" else of_engine(STILL, layouts)
            still = run_learn(config, still)
            assert still.updates[0].grad_norm == 0.0
            assert set(still.updates[1].ratios.values()) <= {1.0}, name
            same = still.metrics["experts/same_routes_share"]
            assert same < 0.2 if replayed == "rollout" else same == 1.0, name
    return reports


def of_engine(rollouts: Rollouts, layouts: Layouts) -> Rollouts:
    """With routes for the layers of the model of these layouts."""
    return with_engines_routes(rollouts, num_layers=num_layers_of(layouts))


def num_layers_of(layouts: Layouts) -> int:
    return 4 if any(VPP in sizes for sizes in layouts.values()) else 2


@pytest.mark.parametrize(
    ("world_size", "layouts", "ways"),
    [
        (2, {"tensor, expert": TWO["tensor, expert"]}, REPLAYS),
        pytest.param(2, FREE, ("none",), marks=pytest.mark.system),
        pytest.param(2, TWO, REPLAYS, marks=pytest.mark.system),
        pytest.param(2, MORE, REPLAYS, marks=SOAK),
        pytest.param(4, FOUR, REPLAYS, marks=SOAK),
        pytest.param(8, EIGHT, REPLAYS, marks=SOAK),
    ],
    ids=["one", "free", "two", "more", "four", "eight"],
)
def test_updates_are_those_of_a_loop_in_float64(
    tmp_path: Path, world_size: int, layouts: Layouts, ways: tuple[str, ...]
) -> None:
    save_model(tmp_path, num_layers=num_layers_of(layouts))
    ranks = run_distributed(learn_everywhere, world_size, tmp_path, layouts, ways)
    for replayed in ways:
        config = config_of(tmp_path, replayed=replayed, optimizer={"weight_decay": 0.0})
        rollouts = of_engine(ROLLOUTS, layouts) if replayed == "rollout" else ROLLOUTS
        with single_rank():
            alone = run_learn(config, rollouts)
        experts = {k: v for k, v in alone.metrics.items() if k.startswith("experts/")}
        if replayed != "rollout":  # there was something to replay
            assert 0.5 < experts["experts/same_routes_share"] < 1
        for name in layouts:
            reports = [rank[name, replayed] for rank in ranks]
            assert_updates(reports, tmp_path, config, rollouts)
            for report in reports:  # every token of every layer counts once
                found = {k: v for k, v in report.metrics.items() if k.startswith("experts/")}
                assert found == experts, (name, replayed)
