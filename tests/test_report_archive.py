"""An archive holds what a report shows."""

from __future__ import annotations

import csv
import math

import pytest

from gapo_megatron.errors import DataError
from gapo_megatron.report import write_report
from gapo_megatron.report.archive import read_archive, write_archive
from gapo_megatron.report.runs import find_runs, read_run
from tests.report_setup import write_run

STEPS = {"num_steps": 100, "wanted": 100}  # curves are means over 10 of them: two bins

PLACES = {
    *("arm", "first", "other", "method", "methods", "metric", "quantity", "stage", "work", "seeds"),
    *("step", "c", "problem"),
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two methods, two seeds, an ablation of the clip, and a run cut off inside a bin."""
    root = tmp_path_factory.mktemp("study")
    for method in ("gapo", "gspo_asym"):
        for seed in (0, 1):
            write_run(root / f"{method}-{seed}", method=method, seed=seed, **STEPS)
    write_run(root / "wide", "objective.eps_high_max=0.02", seed=0, num_steps=33, wanted=100)
    return root


def rows_of(path):
    """By the words and places of a row, its numbers."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        tuple(row[key] for key in row if key in PLACES): {
            key: float(value) for key, value in row.items() if key not in PLACES and value
        }
        for row in rows
    }


def test_every_figure_is_drawn_from_it_again(study, tmp_path):
    archive = tmp_path / "archive"
    first = write_report([study], tmp_path / "first", archive_dir=archive)
    again = write_report([archive], tmp_path / "again")
    assert again.left_out == first.left_out
    drawn = sorted(path.name for path in (tmp_path / "first/figures").iterdir())
    assert sorted(path.name for path in (tmp_path / "again/figures").iterdir()) == drawn
    for path in (tmp_path / "first/figures").glob("*.csv"):
        before, after = rows_of(path), rows_of(tmp_path / "again/figures" / path.name)
        assert 0 < len(after) <= len(before)
        for place, numbers in after.items():  # of the steps that a bin ends with
            assert numbers == pytest.approx(before[place], rel=2e-3, abs=1e-6), (path.name, place)


def test_bins_weigh_as_longer_windows_do(study, tmp_path):
    """Sums of sequences, means per sequence, means over steps; the last bin may be short."""
    write_archive([read_run(study / "wide")], tmp_path)
    (found,) = read_archive(tmp_path)
    run = read_run(study / "wide")
    assert found.num_steps == run.num_steps == 33
    assert list(found.series("reward/mean")) == [4, 9, 14, 19, 24, 29, 32]
    weights, values = "per_c/correct/sequences/c3", "per_c/correct/ratio_deviation/c3"
    for end, steps in {4: range(5), 32: range(30, 33)}.items():
        total = sum(run.series(weights)[step] for step in steps)
        assert found.series(weights)[end] == total
        mean = sum(run.series(weights)[s] * run.series(values)[s] for s in steps) / total
        assert found.series(values)[end] == pytest.approx(mean, rel=1e-3)
    assert found.hours == pytest.approx(run.hours, rel=1e-3)
    assert (found.config, found.seed) == (run.config, 0)


def test_problems_without_a_verdict_stay_so(study, tmp_path):
    run = read_run(study / "wide")
    run.solve_rates[0]["p1"] = math.nan
    write_archive([run], tmp_path)
    assert math.isnan(read_archive(tmp_path)[0].solve_rates[0]["p1"])


def test_names_tell_runs_apart(study, tmp_path):
    run = read_run(study / "wide")
    with pytest.raises(DataError, match="two runs are called wide"):
        write_archive([run, run], tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("runs.csv", "objective", "objectiv", r"runs\.csv:2: not a run's row"),
        ("metrics.csv", "wide,4,", "wide,,", r"metrics\.csv:\d+: no step"),
        ("metrics.csv", "wide,", "wider,", r"metrics\.csv:2: run 'wider' is not in runs\.csv"),
        ("timings.csv", "wide,1,", "wide,one,", r"timings\.csv:2: not a number"),
    ],
)
def test_damage_is_named(study, tmp_path, name, old, new, message):
    write_archive([read_run(study / "wide")], tmp_path)
    path = tmp_path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        read_archive(tmp_path)


def test_a_missing_file_is_named(study, tmp_path):
    write_archive([read_run(find_runs([study])[0][0])], tmp_path)
    (tmp_path / "timings.csv").unlink()
    with pytest.raises(DataError, match=r"timings\.csv: cannot read the file: No such file"):
        read_archive(tmp_path)
