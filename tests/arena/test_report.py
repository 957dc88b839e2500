"""The arena's report: intervals, verdicts, best widths, tables and figures, from known numbers."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.arena import jobs, tables, verdicts
from benchmarks.arena.arms import CHUNKS, OVER_LENGTH, RATE, SCALED, UNCLIPPED, questions
from benchmarks.arena.report import FIGURES, TABLES, report
from benchmarks.arena.train import PASS_AT, Setting, Trained
from benchmarks.arena.verdicts import EQUAL, OUTCOMES
from gapo_megatron.evaluate.statistics import Interval
from gapo_megatron.objective import METHODS
from gapo_megatron.objective.diagnostics import SUMS

NAMES = ("gapo", "gspo_asym", "dapo")


def arms(names=NAMES):
    return {name: Setting(method=METHODS[name], learning_rate=RATE) for name in names}


def trained(ends, *, per_c=None):
    """Seeds that rise in one evaluation to pass@1 and pass@64 of `ends`, in %, and stay there."""
    one, many = (torch.as_tensor(values, dtype=torch.float64) for values in ends)
    high = torch.stack([one, (one + many) / 2, many]) / 100
    curve = torch.stack([torch.zeros_like(high), high, high, high])
    return Trained(curve, torch.zeros(2, len(SUMS), 2, 9) if per_c is None else per_c)


def sums(quantity, values):
    """Sums of the second half with `values` of one quantity by c, and ones for its number."""
    above, below = (SUMS.index(name) for name in verdicts.SHARES[quantity])
    found = torch.zeros(2, len(SUMS), 2, 9, dtype=torch.float64)
    found[1, below, 1] = 1
    for c, value in values.items():
        found[1, above, 1, c] = value
    found[0, above] = 7  # the first half: not to be counted
    found[1, above, 0] = 7  # nor wrong responses
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
    assert cells(text, "gapo") == ["gapo", "32.00", "81.00", "-", "-", "-"]
    assert cells(text, "gspo_asym")[1:] == ["missing"] * 5
    half = 0.1 / 3**0.5 * stats.t.ppf(1 - 0.05 / 2 / 2, 2)
    row = cells(text, "dapo")
    assert row[1:4] == ["31.00", "81.00", f"+1.00 ± {half:.2f}, ahead"]
    assert row[4] == "+0.00 ± 0.00, alike"


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


def test_best_width():
    seeds = torch.arange(8, dtype=torch.float64)
    wiggle = torch.tensor([0.1, -0.1] * 4, dtype=torch.float64)
    values = {1e-3: seeds, 2e-3: seeds + 1 + wiggle, 3e-3: seeds + 0.98 - wiggle}
    best = verdicts.best_width(values, num_rows=1)
    assert (best.width, best.not_resolved) == (2e-3, [3e-3])
    values[3e-3] = seeds + 0.5 + wiggle
    assert verdicts.best_width(values, num_rows=1).not_resolved == []


def test_best_width_counts_all_pairs_of_all_rows():
    """A lead between the t of one comparison and that of all."""
    noise = torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)
    error = float(noise.std()) / 4
    lead = error * float(stats.t.ppf(1 - 0.05 / 6 / 2, 15)) * 1.01  # three pairs, two rows
    zero = torch.zeros(16, dtype=torch.float64)
    values = {1.0: zero - 100, 2.0: zero, 3.0: lead + noise}
    assert verdicts.best_width(values, num_rows=2).not_resolved == []
    assert verdicts.best_width(values, num_rows=3).not_resolved == [2.0]


def test_intervals_within_seeds_leave_out_the_seeds_levels():
    level = torch.tensor([0.0, 50.0, 90.0], dtype=torch.float64)
    (one, other) = verdicts.within_seeds([level, level + torch.tensor([1.0, 2.0, 3.0])])
    assert other.mean - one.mean == pytest.approx(2)
    # Of two arms: each deviates by half the pair's difference, scaled by sqrt(2).
    half = math.sqrt(0.5) / 3**0.5 * stats.t.ppf(0.975, 2)
    assert other.high - other.mean == pytest.approx(half)


def test_widths_table():
    asked, found = {}, {}
    for width, gain in {1e-3: 0.0, 2e-3: 1.0, 4e-3: 0.0}.items():
        method = replace(METHODS["gapo"], eps_high_max=width)
        asked[f"gapo, {width}"] = Setting(method=method, learning_rate=RATE)
        ones = np.array([30.0, 33.0, 36.0]) + gain
        found[f"gapo, {width}"] = [trained((ones, [80.0, 81.0, 82.0]))]
    text = tables.widths(asked, found)
    assert cells(text, "pass@1")[1:] == ["gapo", "8", "33.00", "34.00", "33.00", "0.002"]
    assert cells(text, "pass@64")[3:] == [
        *["81.00"] * 3,
        "0.001, at the end of those tried (not resolved from 0.002, 0.004)",
    ]
    del found["gapo, 0.001"]
    assert cells(tables.widths(asked, found), "pass@1")[3:] == [
        "missing",
        "34.00",
        "33.00",
        "missing",
    ]


def test_pairs_name_arms_that_are_asked_for(monkeypatch):
    monkeypatch.setitem(METHODS, "topr", METHODS.get("topr", METHODS["cispo"]))
    asked = questions(dict.fromkeys(("gapo", *SCALED, OVER_LENGTH), 1.0))
    probes, rates = tables.probe_pairs(asked["probes"]), tables.rate_pairs(asked["rates"])
    assert (len(probes), len(rates)) == (6, 45)
    assert {name for pair in probes for name in pair} == set(asked["probes"])
    assert {name for pair in rates for name in pair} == set(asked["rates"])
    assert sum(map(len, tables.width_rows(asked["widths"]).values())) == len(asked["widths"])
    assert {question for question, _ in (*TABLES.values(), *FIGURES.values())} == set(asked)


def test_report_of_what_is_trained(tmp_path, monkeypatch, capsys):
    """From files of a real training, very short; half of the arms are not there."""
    monkeypatch.setattr(jobs, "SEEDS_PER_CHUNK", 2)
    monkeypatch.setattr(jobs, "EVALUATE_EVERY", 1)
    for question in CHUNKS:
        monkeypatch.setitem(CHUNKS, question, 2)
    short = {
        name: Setting(method=method, learning_rate=RATE, num_steps=3)
        for name, method in {**{name: METHODS[name] for name in NAMES}, "un": UNCLIPPED}.items()
    }
    for name in ("gapo", "gspo_asym", "un"):
        for chunk in range(2):
            jobs._train(jobs.Job(short[name], chunk), tmp_path)
    rated = {f"{name}, rate 0.05, fresh": short[name] for name in ("gapo", "gspo_asym")}
    rated["unclipped, rate 0.05, fresh"] = short["un"]
    probed = {f"{name}, rate 0.05": short[name] for name in ("gapo", "gspo_asym")}
    probed |= {f"{name}, rate 0.05": short["dapo"] for name in ("gapo_matched", "reversed")}
    asked = {
        "rules": short,
        "stale rules": {"gapo": short["dapo"], "dapo": short["dapo"]},
        "clip alone": {"gapo": short["gapo"], "dapo": short["dapo"]},
        "rates": rated,
        "probes": probed,
        "widths": {name: short[name] for name in ("gapo", "gspo_asym")},
        "aggregation": {"gapo": short["gapo"]},
        "weights": {f"gapo, rate 0.05, {one}": short["gapo"] for one in ("none", "token")},
        "proportional": {f"{one}, raw A": short["gapo"] for one in ("floor", "proportional")},
    }
    report(asked, tmp_path)
    printed = capsys.readouterr().out
    assert all(f"## {title}\n" in printed for title in TABLES)
    assert "Missing: 1 of 4 arms of 'rules' (dapo). `python -m benchmarks.arena --folder" in printed
    assert "Missing: 2 of 2 arms of 'stale rules' (gapo; dapo)" in printed
    assert "verdicts_stale: not drawn" in printed
    drawn = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert drawn == set(FIGURES) - {"verdicts_stale", "verdicts_clip_alone"}
    with (tmp_path / "report" / "verdicts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == [*OUTCOMES] * 2
    arm = jobs.read(short["gapo"], 2, tmp_path)
    pass_1 = torch.cat([100 * one.curve[-3:, PASS_AT.index(1)].mean(0) for one in arm]).mean()
    assert f"| gapo | {pass_1:.2f} |" in printed
    nothing = "+0.00 ± 0.00, alike"
    assert f"| gapo, rate 0.05 | token minus none | {nothing} |" in printed
    assert f"| raw A | proportional minus floor | {nothing} |" in printed
