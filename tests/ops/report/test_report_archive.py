"""An archive holds what a report shows."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from gapo_megatron.config.methods import METHODS
from gapo_megatron.errors import DataError
from gapo_megatron.ops.report import report, write_report
from gapo_megatron.ops.report.archive import BIN_STEPS, read_archive, write_archive
from gapo_megatron.ops.report.arms import Comparison
from gapo_megatron.ops.report.intervention import correlation_since
from gapo_megatron.ops.report.learning import reward_rows
from gapo_megatron.ops.report.outcomes import summary
from gapo_megatron.ops.report.runs import find_trained, read_run
from tests.messages import mentions
from tests.report_setup import clipped_tokens, length, write_run

STEPS = {"num_steps": 100, "wanted": 100}  # curves are means over 10 of them: two bins

PLACES = {
    *("arm", "first", "other", "method", "methods", "metric", "quantity", "stage", "seeds"),
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
            # Two seeds' interval is 13 times as wide as their difference, of five digits of 0.04.
            assert numbers == pytest.approx(before[place], rel=2e-3, abs=5e-6), (path.name, place)


def test_bins_weigh_as_longer_windows_do(study, tmp_path):
    """Sums of sequences, means per sequence or token, over steps; the last bin may be short."""
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
        tokens = [run.series(weights)[s] * length(3, s) for s in steps]
        clipped = [clipped_tokens(3, 0, s) for s in steps]
        shown = found.series("per_c/correct/clip_fraction_tokens/c3")[end]
        assert shown == pytest.approx(np.average(clipped, weights=tokens), rel=1e-3)
    assert found.hours == pytest.approx(run.hours, rel=1e-3)
    assert (found.method, found.seed) == (run.method, 0)


def of_archive(folder, archive):
    """A run as an archive gives it back."""
    write_archive([read_run(folder)], archive)
    return read_archive(archive)[0]


def rows_in(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_windows_are_whole_bins_and_start_with_the_run(study, tmp_path):
    """Of 100 steps a tenth are two bins, the first of which ends the curve's first point."""
    whole = read_run(study / "gapo-1")
    by_step = {row["step"]: row for row in reward_rows(Comparison.of([whole]).arms)[0]}
    comparison = Comparison.of([of_archive(study / "gapo-1", tmp_path / "whole")])
    rows, window = reward_rows(comparison.arms)
    assert window == 10
    assert [row["step"] for row in rows] == list(range(9, 100, BIN_STEPS))
    for row in rows:
        assert row["mean"] == pytest.approx(by_step[row["step"]]["mean"], rel=1e-4)
    # Of 33 steps a tenth are three; the last three are no bin.
    cut = of_archive(study / "wide", tmp_path / "cut")
    rows, window = reward_rows(Comparison.of([cut]).arms)
    assert window == 5
    assert [row["step"] for row in rows] == list(range(4, 30, BIN_STEPS))
    values = read_run(study / "wide").series("reward/mean")
    for row in rows:
        mean = sum(values[row["step"] - i] for i in range(BIN_STEPS)) / BIN_STEPS
        assert row["mean"] == pytest.approx(mean, rel=1e-4)


def test_a_bin_that_holds_steps_before_a_branch_point_does_not_count(study, tmp_path):
    run = of_archive(study / "gapo-0", tmp_path)
    assert min(correlation_since(run, 50)) == 50 + 9  # a tenth of 100 steps are two bins
    run.metrics["per_c/correct/ratio_deviation/c1"][54] = 1.0  # of steps 50 to 54
    found = correlation_since(run, 52)
    assert list(found) == list(range(64, 100, BIN_STEPS))
    assert list(found.values()) == pytest.approx([1.0] * len(found), abs=1e-4)


def test_settings_stay_what_they_were(study, tmp_path, monkeypatch):
    """Whatever presets and defaults are later."""
    run = read_run(study / "gapo-0")
    write_archive([run], tmp_path)
    written = json.loads(rows_in(tmp_path / "runs.csv")[0]["config"])
    expected = run.config.model_dump(mode="json")
    own = ("adaptive", "eps_low", "eps_high_max", "aggregation", "normalize_std")
    own += ("std_floor", "focal_gamma")
    expected["objective"] |= {key: getattr(run.method, key) for key in own}
    assert written == expected
    before = run.method
    monkeypatch.setitem(METHODS, "gapo", replace(METHODS["gapo"], normalize_std=True))
    assert run.method != before
    assert read_archive(tmp_path)[0].method == before


@pytest.mark.parametrize("method", ["topr", "dppo_tv", "m2po", "bapo"])
def test_a_number_that_a_method_lacks_is_no_setting_of_its_archive(tmp_path, method):
    """The config would refuse it."""
    preset = METHODS[method]
    widths = [f"objective.{key}={getattr(preset, key)}" for key in ("eps_low", "eps_high_max")]
    run = read_run(write_run(tmp_path / "run", *widths, method=method))
    write_archive([run], tmp_path / "archive")
    assert read_archive(tmp_path / "archive")[0].method == preset


def test_no_more_is_kept_than_figures_need(study, tmp_path):
    run = of_archive(study / "gapo-0", tmp_path)
    assert [row["num_steps"] for row in rows_in(tmp_path / "timings.csv")] == ["1", "100"]
    (first, *_) = rows_in(tmp_path / "solve_rates.csv")
    per = run.config.evaluation.samples_per_prompt
    assert first["per"] == str(per)
    whole = read_run(study / "gapo-0")
    expected = {key: str(round(per * rate)) for key, rate in whole.solve_rates[0].items()}
    assert {key: first[key] for key in expected} == expected
    assert run.solve_rates == whole.solve_rates


def freeze_code(folder, name, commit, *, changes=False, text=""):
    """As a job leaves it."""
    package = folder / "code" / name / "gapo_megatron"
    package.mkdir(parents=True)
    (package / "a.py").write_text(text)
    origin = {"commit": commit, "has_local_changes": changes}
    (package.parent / "code.json").write_text(json.dumps(origin))


def test_the_page_says_where_runs_of_a_method_had_other_code(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAKERS", {"Summary": summary})  # the figures say nothing of it
    a, b = "a" * 40, "b" * 40
    folders = {name: tmp_path / name for name in ("x0", "x1", "y0", "y1", "z0")}
    for number, (name, folder) in enumerate(folders.items()):
        write_run(folder, method={"x": "gapo", "y": "gspo", "z": "grpo"}[name[0]], seed=number)
    freeze_code(folders["x0"], "1", a)
    freeze_code(folders["x1"], "1", a)
    freeze_code(folders["x1"], "2", b)
    freeze_code(folders["y0"], "1", None, changes=None, text="y0")
    freeze_code(folders["z0"], "1", a, changes=True, text="z0")
    archive, output = tmp_path / "archive", tmp_path / "report"
    live = write_report(list(folders.values()), output, archive_dir=archive).page.read_text()
    note = f"gapo (x0: {a[:12]}; x1: {a[:12]} and {b[:12]})"
    assert note in live
    again = write_report([archive], tmp_path / "again").page.read_text()
    assert note in again
    kept = {run.folder.name: run.code for run in read_archive(archive)}
    assert (kept["y1"], len(kept["y0"]), len(kept["z0"])) == ((), 1, 1)
    assert kept["z0"][0].startswith(f"{a[:12]}+")
    (folders["x0"] / "code/1/code.json").write_text("[]")
    with pytest.raises(DataError, match=mentions(folders["x0"] / "code/1/code.json")):
        read_run(folders["x0"])


def test_problems_without_a_verdict_stay_so(study, tmp_path):
    run = read_run(study / "wide")
    run.solve_rates[0]["p1"] = math.nan
    write_archive([run], tmp_path)
    assert math.isnan(read_archive(tmp_path)[0].solve_rates[0]["p1"])


def test_names_tell_runs_apart(study, tmp_path):
    run = read_run(study / "wide")
    with pytest.raises(DataError, match=mentions("two", "wide")):
        write_archive([run, run], tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("runs.csv", "objective", "objectiv", r"(?s)runs\.csv:2\b.*\bobjectiv\b"),
        ("metrics.csv", "wide,4,", "wide,,", r"metrics\.csv:\d+\b.*\bstep\b"),
        ("metrics.csv", "wide,", "wider,", r"metrics\.csv:2\b.*\bwider\b.*\bruns\.csv\b"),
        ("timings.csv", "wide,1,", "wide,one,", r"timings\.csv:2\b.*\bone\b"),
    ],
)
def test_damage_is_named(study, tmp_path, name, old, new, words):
    write_archive([read_run(study / "wide")], tmp_path)
    path = tmp_path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=words):
        read_archive(tmp_path)


def test_a_missing_file_is_named(study, tmp_path):
    write_archive([read_run(find_trained([study])[0][0])], tmp_path)
    (tmp_path / "timings.csv").unlink()
    with pytest.raises(DataError, match=mentions(tmp_path / "timings.csv")):
        read_archive(tmp_path)


def test_an_archive_executes_nothing(study, tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    named = f"{tmp_path}/own.py:METHOD"
    run = read_run(study / "wide")
    write_archive([run], tmp_path / "archive")
    rows = tmp_path / "archive" / "runs.csv"
    assert rows.read_text().count('""method"":""gapo""') == 1
    rows.write_text(rows.read_text().replace('""method"":""gapo""', f'""method"":""{named}""'))
    with pytest.raises(DataError, match=r"runs\.csv:2.*own\.py"):
        read_archive(tmp_path / "archive")
    assert not (tmp_path / "executed").exists()
