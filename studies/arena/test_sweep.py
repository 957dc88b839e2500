"""The width sweep: which widths are tried, and which is best."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from studies.arena import sweep
from studies.arena.arms import SCALED
from studies.arena.jobs import SELECTION, Job, Store
from studies.arena.sweep import Cell
from studies.arena.train import Setting, Trained

SCALES = dict.fromkeys(SCALED, 1.0)
CELL = Cell("gspo_asym", "fresh", 0.05, 8)
UNBOUNDED = Cell("topr", "fresh", 0.05, 8)


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
