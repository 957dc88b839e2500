"""The arena's report: intervals, verdicts, best widths, tables and figures, from known numbers."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from gapo_megatron.objective import METHODS
from gapo_megatron.objective.diagnostics import SUMS
from gapo_tools.evaluation.statistics import Interval
from studies.arena import jobs, tables, verdicts
from studies.arena import train as trainer
from studies.arena.arms import (
    CHUNKS,
    OVER_LENGTH,
    RATE,
    SCALED,
    UNCLIPPED,
    questions,
    read_scales,
)
from studies.arena.report import FIGURES, TABLES, all_tables, report
from studies.arena.sweep import Cell, best_settings, sweep
from studies.arena.train import PASS_AT, QUARTERS, Setting, Trained
from studies.arena.verdicts import EQUAL, OUTCOMES

NAMES = ("gapo", "gspo_asym", "dapo")


def arms(names=NAMES):
    return {name: Setting(method=METHODS[name], learning_rate=RATE) for name in names}


def trained(ends, *, per_c=None):
    """Seeds that rise in one evaluation to pass@1 and pass@64 of `ends`, in %, and stay there."""
    one, many = (torch.as_tensor(values, dtype=torch.float64) for values in ends)
    high = torch.stack([one, many, one]) / 100
    curve = torch.stack([torch.zeros_like(high), high, high, high])
    nothing = torch.zeros(0)
    sums = torch.zeros(QUARTERS, len(SUMS), 2, 9) if per_c is None else per_c
    return Trained(curve, sums, nothing, nothing)


def sums(quantity, values):
    """Sums of the third quarter with `values` of one quantity by c, and ones for its number."""
    above, below = (SUMS.index(name) for name in verdicts.SHARES[quantity])
    found = torch.zeros(QUARTERS, len(SUMS), 2, 9, dtype=torch.float64)
    found[2, below, 1] = 1
    for c, value in values.items():
        found[2, above, 1, c] = value
    found[:2, above] = 7  # the first half: not to be counted
    found[2, above, 0] = 7  # nor wrong responses
    return found


def cells(text, label, *, column=0):
    """The cells of the row whose `column` is `label`."""
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines()]
    (row,) = [row for row in rows if row[column] == label]
    return row


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
    assert compared["dapo", "gapo"]["pass@1"].mean == pytest.approx(-2)
    assert compared["gapo", "dapo"]["pass@64"].mean == pytest.approx(0)


def test_outcomes_table():
    ones = np.array([30.0, 31.0, 32.0])
    found = {
        "gapo": [trained((ones + np.array([1.0, 1.1, 0.9]), ones + 50))],
        "dapo": [trained((ones, ones + 50))],
    }
    text = tables.outcomes(arms(), found)
    assert cells(text, "gapo") == ["gapo", "0.003, 0.005", "32.00", "81.00", "-", "-", "-"]
    assert cells(text, "gspo_asym")[2:] == ["missing"] * 5
    half = 0.1 / 3**0.5 * stats.t.ppf(1 - 0.05 / 2 / 2, 2)
    row = cells(text, "dapo")
    assert row[1:5] == ["0.2, 0.28", "31.00", "81.00", f"+1.00 ± {half:.2f}, ahead"]
    assert row[5] == "+0.00 ± 0.00, alike"


def test_shares_by_c_are_of_correct_responses_of_the_second_half():
    per_c = sums("clipped", {1: 0.4, 2: 0.2, 6: 0.1, 7: 0.1})
    found = [trained(([1.0], [1.0]), per_c=per_c)]
    assert verdicts.shares(found, "clipped", (1, 2)) == pytest.approx([30])
    assert verdicts.shares(found, "clipped", (6, 7)) == pytest.approx([10])
    assert math.isnan(verdicts.shares(found, "gradient mass lost", (1, 2))[0])


def test_by_c_table_has_scarce_minus_abundant_over_chunks():
    def chunk(scarce):
        return trained(
            ([1.0], [1.0]), per_c=sums("clipped", {1: scarce, 2: scarce, 6: 0.1, 7: 0.1})
        )

    text = tables.by_c(arms(), {"gapo": [chunk(0.3), chunk(0.32), chunk(0.34)]})
    half = 2 / 3**0.5 * stats.t.ppf(1 - 0.05 / 3 / 2, 2)
    assert cells(text, "gapo")[1:5] == ["sequence", "32.00", "10.00", f"+22.00 ± {half:.2f}"]
    assert cells(text, "gapo")[5:] == ["0.00", "0.00", "+0.00 ± 0.00", "-", "-", "-"]
    assert cells(text, "dapo")[2:] == ["missing"] * 9


def test_pairs_name_arms_that_are_asked_for():
    asked = questions(dict.fromkeys(("gapo", *SCALED, OVER_LENGTH), 1.0))
    probes = tables.probe_pairs(asked["probes"])
    assert len(probes) == 6
    assert {name for pair in probes for name in pair} == set(asked["probes"])
    assert {question for question, _ in TABLES.values()} == set(asked)
    assert set(CHUNKS) == {*asked, "best"}


def test_report_of_what_is_trained(tmp_path, monkeypatch, capsys):
    """From files of a real training, very short; half of the arms are not there."""
    monkeypatch.setattr(jobs, "SEEDS_PER_CHUNK", 2)
    monkeypatch.setattr(jobs, "EVALUATE_EVERY", 1)
    monkeypatch.setattr(trainer, "MEASURE_EVERY", 1)
    for question in CHUNKS:
        monkeypatch.setitem(CHUNKS, question, 2)
    short = {
        name: Setting(method=method, learning_rate=RATE, num_steps=3)
        for name, method in {**{name: METHODS[name] for name in NAMES}, "un": UNCLIPPED}.items()
    }
    store = jobs.Store(tmp_path, archive=tmp_path / "none.npz")
    trained_now = [jobs.Job(short[name], at) for name in (*NAMES[:2], "un") for at in range(2)]
    for job in trained_now:
        jobs._train(job, tmp_path / f"{job.name}.npz")
    conditions = [("fresh", RATE, 8), ("stale", RATE, 8)]
    best = {Cell(name, *conditions[0]): (2.0, short[name]) for name in NAMES}
    best |= {Cell(name, *conditions[1]): (1.0, short["dapo"]) for name in ("gapo", "dapo")}
    swept = {cell: {1.0: torch.ones(2, 4), 2.0: torch.full((2, 4), 2.0)} for cell in best}
    rates = ("rate 0.05", "rate 0.1")
    probes = {f"{name}, {rate}": short[name] for name in NAMES[:2] for rate in rates}
    probes |= {
        f"{name}, {rate}": short["dapo"] for name in ("gapo_matched", "reversed") for rate in rates
    }
    asked = {
        "probes": probes,
        "aggregation": {"gapo": short["gapo"]},
        "weights": {f"gapo, rate 0.05, {one}": short["gapo"] for one in ("none", "token")},
        "proportional": {f"{one}, raw A": short["gapo"] for one in ("floor", "proportional")},
        **{question: {"gapo": short["gapo"]} for question in CHUNKS if "transformer" in question},
    }
    report(asked, store, swept, best)
    printed = capsys.readouterr().out
    assert printed.startswith((tmp_path / "report" / "tables.md").read_text())
    assert all(f"## {title}\n" in printed for title in TABLES)
    assert "Missing: 1 of 3 arms (dapo). `make arena` trains" in printed
    assert "Missing: 2 of 2 arms (gapo; dapo)" in printed
    assert "verdicts_stale: not drawn" in printed
    drawn = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert drawn == {"sweeps", *FIGURES} - {"verdicts_stale"}
    with (tmp_path / "report" / "verdicts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == [*OUTCOMES]
    arm = store.read(short["gapo"], range(2))
    pass_1 = torch.cat([100 * one.curve[-3:, PASS_AT.index(1)].mean(0) for one in arm]).mean()
    assert f"| gapo | 0.003, 0.005 | {pass_1:.2f} |" in printed
    assert "| fresh, rate 0.05, k 8 | gapo | 1.0 / 1.0 | 2.0 / 2.0 | 2 |" in printed
    nothing = "+0.00 ± 0.00, alike"
    assert f"| gapo, rate 0.05 | token minus none | {nothing} |" in printed
    assert f"| raw A | proportional minus floor | {nothing} |" in printed


def test_the_page_of_tables_is_made_from_the_archive(tmp_path: Path) -> None:
    store, scales = jobs.Store(tmp_path), read_scales()
    swept = sweep(store, scales)
    page = all_tables(questions(scales), store, swept, best_settings(swept, scales))
    assert page == Path(__file__).with_name("tables.md").read_text()
