"""The arena's report: intervals and verdicts from known numbers, the page from the archive."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from gapo_tools.evaluation.statistics import Interval
from studies.arena import jobs, verdicts
from studies.arena.arms import questions, read_scales
from studies.arena.report import all_tables
from studies.arena.sweep import best_settings, sweep
from studies.arena.train import Trained
from studies.arena.verdicts import EQUAL


def trained(ends):
    """Seeds that rise in one evaluation to pass@1 and pass@64 of `ends`, in %, and stay there."""
    one, many = (torch.as_tensor(values, dtype=torch.float64) for values in ends)
    high = torch.stack([one, many, one]) / 100
    curve = torch.stack([torch.zeros_like(high), high, high, high])
    nothing = torch.zeros(0)
    return Trained(curve, nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("low", "high", "outcome", "expected"),
    [
        (0.1, 0.5, "pass@1", "ahead"),
        (0.1, 0.2, "pass@1", "ahead"),
        (0.05, 0.19, "pass@1", "ahead, by less than matters"),
        (-0.5, -0.1, "pass@1", "behind"),
        (-0.19, -0.05, "pass@1", "behind, by less than matters"),
        (-0.19, 0.19, "pass@1", "alike"),
        (0.0, 0.0, "pass@1", "alike"),
        (-0.2, 0.1, "pass@1", "not resolved"),
        (-0.1, 0.2, "pass@1", "not resolved"),
        (-0.4, 0.4, "pass@64", "alike"),
        (-0.4, 0.6, EQUAL, "not resolved"),
    ],
)
def test_verdicts(low, high, outcome, expected):
    assert verdicts.verdict(Interval((low + high) / 2, low, high), outcome) == expected


def test_differences_are_paired_and_hold_together_for_all_rows():
    """Seeds spread by tens of points, differences by a point: only pairs show it."""
    level, gain = [10.0, 40.0, 70.0, 20.0], np.array([1.0, 2.0, 3.0, 2.0])
    high = [90.0, 80.0, 95.0, 85.0]
    found = {
        "gapo": [
            trained((level[:2] + gain[:2], high[:2])),
            trained((level[2:] + gain[2:], high[2:])),
        ],
        "dapo": [trained((level[:2], high[:2])), trained((level[2:], high[2:]))],
    }
    pairs = [("gapo", "gspo_asym"), ("gapo", "dapo"), ("dapo", "gapo")]
    compared = verdicts.compare(found, pairs)
    assert list(compared) == pairs[1:]
    # sd 0.8165 of four, df 3; three rows, one of which is missing.
    half = math.sqrt(2 / 3) / 2 * stats.t.ppf(1 - 0.05 / 3 / 2, 3)
    interval = compared["gapo", "dapo"]["pass@1"]
    assert interval.mean == pytest.approx(2)
    assert interval.high - interval.mean == pytest.approx(half)
    wider = verdicts.compare(found, pairs, more_rows=4)["gapo", "dapo"]["pass@1"]
    half = math.sqrt(2 / 3) / 2 * stats.t.ppf(1 - 0.05 / 7 / 2, 3)
    assert wider.high - wider.mean == pytest.approx(half)
    assert compared["dapo", "gapo"]["pass@1"].mean == pytest.approx(-2)
    assert compared["gapo", "dapo"]["pass@64"].mean == pytest.approx(0)


def test_the_page_of_tables_is_made_from_the_archive(tmp_path: Path) -> None:
    store, scales = jobs.Store(tmp_path), read_scales()
    swept = sweep(store, scales)
    page = all_tables(questions(scales), store, swept, best_settings(swept, scales))
    assert page == Path(__file__).with_name("tables.md").read_text()
