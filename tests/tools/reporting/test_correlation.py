"""Correlation early and late with its bootstrap, and the dose: the report's table and figure."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from gapo_tools.reporting.correlation import RESAMPLES, Steps, bootstrap, correlation, pearson
from gapo_tools.reporting.figures import PEARSON, over_training
from gapo_tools.reporting.runs import read_run
from gapo_tools.reporting.series import NoData
from gapo_tools.reporting.style import style
from tests.report_setup import DOSE, NUM_STEPS, compare, rows_of, write_run

K = 8


def scattered(path, *, seed=0, spread=1e-3):
    """The run in `path` with deviations of random sign and slope, another for each step and c."""
    generator = np.random.default_rng(seed)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "reward/mean" in row:
            for c in range(1, K):
                key = f"per_c/correct/ratio_deviation/c{c}"
                row[key] = spread * generator.standard_normal() - 1e-5 * c
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rollouts(run, first, end):
    """Deviations and advantages of every correct rollout of these steps, by c."""
    found = {}
    for c in range(1, K):
        of_c = found.setdefault(c, ([], []))
        for step in range(first, end):
            number = int(run.series(f"per_c/correct/sequences/c{c}")[step])
            for values, name in zip(of_c, ("ratio_deviation", "advantage"), strict=True):
                values += [run.series(f"per_c/correct/{name}/c{c}")[step]] * number
    return found


def test_r_is_that_of_all_rollouts_of_a_half_and_lies_in_its_interval(tmp_path):
    folder = scattered(write_run(tmp_path / "run"))
    early, late = correlation(compare(folder)).rows
    assert (early["first"], early["last"]) == (0, NUM_STEPS // 2 - 1)
    assert (late["first"], late["last"]) == (NUM_STEPS // 2, NUM_STEPS - 1)
    run = read_run(folder)
    for row in (early, late):
        by_c = rollouts(run, row["first"], row["last"] + 1)
        means = np.array([[np.mean(one) for one in by_c[c]] for c in by_c])
        assert row["ratio_deviation"] == pytest.approx(np.corrcoef(means.T)[0, 1], abs=1e-12)
        assert -1 <= row["ratio_deviation low"] < row["ratio_deviation high"] <= 1
    # |s - 1| of these runs falls with c in every step.
    assert late["ratio_abs_deviation"] == pytest.approx(1)
    assert late["ratio_abs_deviation low"] == pytest.approx(1)
    assert correlation(compare(folder)).rows == [early, late]  # no chance in it


def test_the_interval_is_that_of_steps_drawn_again(tmp_path):
    """By a loop over draws with other random numbers: the same within their noise."""
    (steps,) = Steps.of([read_run(scattered(write_run(tmp_path / "run")))], "ratio_deviation")
    r, low, high = bootstrap([steps.sums])
    generator = np.random.default_rng(7)
    found = []
    for _ in range(4 * RESAMPLES):
        number, *totals = steps.sums[generator.integers(0, NUM_STEPS, NUM_STEPS)].sum(axis=0)
        found.append(np.corrcoef([total / number for total in totals])[0, 1])
    expected = np.percentile(found, [2.5, 97.5])
    assert (low, high) == pytest.approx(tuple(expected), abs=0.06)
    assert low < r < high


def test_seeds_with_other_values_of_c_are_pooled_by_c(tmp_path):
    """One has no group with c = 2, the other none with c = 7."""
    folders = [scattered(write_run(tmp_path / f"{seed}", seed=seed), seed=seed) for seed in (0, 1)]
    for folder, c in zip(folders, (2, 7), strict=True):
        path = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{key: row[key] for key in row if not key.endswith(f"/c{c}")} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    early, _ = correlation(compare(*folders)).rows
    values = {c: ([], []) for c in range(1, K)}
    for folder, other in zip(folders, (2, 7), strict=True):
        run = read_run(folder)
        for c in values.keys() - {other}:
            for step in range(NUM_STEPS // 2):
                number = int(run.series(f"per_c/correct/sequences/c{c}")[step])
                for one, name in zip(values[c], ("ratio_deviation", "advantage"), strict=True):
                    one += [run.series(f"per_c/correct/{name}/c{c}")[step]] * number
    means = np.array([[np.mean(one) for one in values[c]] for c in values])
    assert early["ratio_deviation"] == pytest.approx(np.corrcoef(means.T)[0, 1], abs=1e-12)


def test_pearson_leaves_out_c_without_rollouts():
    sums = np.array(
        [
            [[2, 1, 1, 0], [0.2, 0.3, 0.1, 0], [1.4, 0.6, 0.5, 0]],
            [[2, 1, 0, 0], [0.2, 0.3, 0, 0], [1.4, 0.6, 0, 0]],  # two points say nothing
            [[1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1], [0.7, 0.6, 0.5, 0.4]],  # constant
        ]
    )
    found = pearson(sums)
    assert found[0] == pytest.approx(np.corrcoef([0.1, 0.3, 0.1], [0.7, 0.6, 0.5])[0, 1])
    assert all(map(math.isnan, found[1:]))


def test_only_methods_with_widths_by_c_have_a_dose(tmp_path):
    folders = [write_run(tmp_path / method, method=method) for method in ("gapo", "gspo_asym")]
    exhibit = correlation(compare(*folders))
    early, late = rows_of(exhibit, method="gapo")
    half = NUM_STEPS // 2
    assert early["decisions"] == pytest.approx(DOSE * (1 + (half - 1) / 2))
    assert late["decisions"] == pytest.approx(DOSE * (1 + (half + NUM_STEPS - 1) / 2))
    assert late["gradient"] == pytest.approx(DOSE / 2)
    assert [row["decisions"] for row in rows_of(exhibit, method="gspo_asym")] == [None, None]
    cells = {row[0]: row[-2:] for row in exhibit.table.rows}
    assert cells["gspo_asym"] == ["-", "-"]
    assert cells["gapo"][1] == "0.05"


def test_a_single_seed_has_a_band_around_its_correlation(tmp_path):
    with style():
        exhibit = over_training(compare(scattered(write_run(tmp_path / "run"))))
    rows = [row for row in exhibit.rows if row["quantity"] == PEARSON]
    assert len(rows) == NUM_STEPS
    assert rows[0]["low"] is None  # of one step there is none
    assert all(-1 <= row["low"] <= row["high"] <= 1 for row in rows[2:])


def test_runs_without_the_metrics_say_so(tmp_path):
    folder = write_run(tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text().replace("ratio_deviation", "other")
    (folder / "metrics.jsonl").write_text(text)
    with pytest.raises(NoData, match="ratio_deviation"):
        correlation(compare(folder))
