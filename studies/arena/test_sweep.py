"""The width sweep: which widths are tried, and which is best."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from studies.arena import sweep
from studies.arena.arms import SCALED, WITHOUT_WIDTH
from studies.arena.jobs import SELECTION, Job, Store
from studies.arena.sweep import Cell
from studies.arena.train import Setting, Trained

SCALES = dict.fromkeys(SCALED, 1.0)
CELL = Cell("gspo_asym", "fresh", 0.05, 8)
UNBOUNDED = Cell("topr", "fresh", 0.05, 8)


def _outcomes(best: float) -> dict[float, Tensor]:
    """Two seeds' pass@1 and pass@64; the sum is highest at the factor `best`."""
    return {factor: torch.full((2, 2), -abs(factor - best)) for factor in sweep.FACTORS}


def test_the_best_factor_has_the_highest_sum_over_both_outcomes() -> None:
    outcomes = {1.0: torch.tensor([[50.0, 52.0], [90.0, 90.0]])}
    outcomes[2.0] = torch.tensor([[52.0, 52.0], [87.0, 89.0]])
    assert sweep.best_factor(outcomes) == 1.0
    outcomes[4.0] = torch.tensor([[49.0, 49.0], [93.0, 94.0]])
    assert sweep.best_factor(outcomes) == 4.0


@pytest.mark.parametrize(("best", "expected"), [(0.5, 0.25), (1, None), (4, None), (8, 16.0)])
def test_a_sweep_is_continued_at_its_end(best: float, expected: float | None) -> None:
    assert sweep._next_factor(_outcomes(best)) == expected


def test_a_sweep_ends_somewhere() -> None:
    outcomes = {sweep.LARGEST: torch.ones(2, 2), 1.0: torch.zeros(2, 2)}
    assert sweep._next_factor(outcomes) is None
    outcomes = {sweep.SMALLEST: torch.ones(2, 2), 1.0: torch.zeros(2, 2)}
    assert sweep._next_factor(outcomes) is None


def test_arms_of_cells() -> None:
    assert sweep.setting(CELL, 2.0, SCALES).method.eps_high_max == 1e-2
    stale = sweep.setting(CELL._replace(mode="stale", rate=0.1, group_size=4), 1.0, SCALES)
    assert (stale.staleness, stale.weights, stale.around_sampler) == (4, "none", False)
    assert (stale.learning_rate, stale.group_size) == (0.1, 4)
    around = sweep.setting(CELL._replace(mode="stale, around the sampler"), 1.0, SCALES)
    assert (around.staleness, around.around_sampler) == (4, True)
    dapo = sweep.setting(CELL._replace(rule="dapo"), 2.0, SCALES | {"dapo": 0.25})
    assert dapo.method.eps_high_max == pytest.approx(0.14)
    assert sweep.setting(UNBOUNDED, 1.0, SCALES).method is WITHOUT_WIDTH["topr"]
    assert len(set(sweep.cells())) == len(sweep.cells())


def test_a_sweep_trains_until_its_best_width_is_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wider the better, up to 16 times; each width is trained once."""
    trained: list[Job] = []

    class Known(Store):
        def run(self, jobs: Iterable[Job], *, num_processes: int) -> None:
            trained.extend(job for job in jobs if job not in trained)

        def __contains__(self, job: Job) -> bool:
            return job in trained

        def read(self, setting: Setting, chunks: Iterable[int]) -> list[Trained]:
            assert list(chunks) == [SELECTION]
            factor = setting.method.eps_high_max / 5e-3
            curve = torch.full((3, 3, 32), -abs(factor - 16) / 100)
            return [Trained(curve, curve, curve, curve)]

    monkeypatch.setattr(sweep, "cells", lambda: [CELL, UNBOUNDED])
    store = Known(tmp_path)
    assert sweep.sweep(store, SCALES) == {CELL: {}}
    assert sweep.best_settings({CELL: {}}, SCALES).keys() == {UNBOUNDED}
    found = sweep.sweep(store, SCALES, num_processes=1)
    assert sorted(found[CELL]) == [*sweep.FACTORS, 16.0, 32.0]
    assert len(trained) == 7
    assert sweep.sweep(store, SCALES)[CELL].keys() == found[CELL].keys()
    best = sweep.best_settings(found, SCALES)
    assert best[CELL][0] == 16.0 and best[UNBOUNDED][0] == 1.0
    assert best[CELL][1].method.eps_high_max == pytest.approx(0.08)
