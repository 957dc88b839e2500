"""An archive holds what a report shows."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gapo_megatron.config.methods import METHODS
from gapo_megatron.errors import DataError
from gapo_megatron.launch.freeze import freeze
from gapo_tools.reporting.arms import Comparison
from gapo_tools.reporting.figures import deviation_per_c, over_training
from studies.archive import BIN_STEPS, frozen_code, read_archive, read_study_run, write_archive
from studies.miniature.claims import correlation_since
from tests.launch.test_freeze import checkout, git  # noqa: F401 (a fixture)
from tests.messages import mentions
from tests.report_setup import clipped_tokens, length, write_run

STEPS = {"num_steps": 100, "wanted": 100}  # curves are means over 10 of them: two bins


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two methods, two seeds, an ablation of the clip, and a run cut off inside a bin."""
    root = tmp_path_factory.mktemp("study")
    for method in ("gapo", "gspo_asym"):
        for seed in (0, 1):
            write_run(root / f"{method}-{seed}", method=method, seed=seed, **STEPS)
    write_run(root / "wide", "objective.eps_high_max=0.02", seed=0, num_steps=33, wanted=100)
    return root


def test_figures_are_drawn_from_it_again(study, tmp_path):
    """At the end of bins, for which two seeds' interval is 13 times their difference's rounding."""
    runs = [read_study_run(study / f"gapo-{seed}") for seed in (0, 1)]
    write_archive(runs, tmp_path)
    for make in (over_training, deviation_per_c):
        before, after = (
            {
                (row.get("quantity"), row.get("c"), row["step"]): row
                for row in make(Comparison.of(found)).rows
            }
            for found in (runs, read_archive(tmp_path))
        )
        assert 0 < len(after) < len(before)
        for place, row in after.items():
            for key in ("mean", "low", "high"):
                assert row[key] == pytest.approx(before[place][key], rel=2e-3, abs=5e-6)


def test_bins_weigh_as_longer_windows_do(study, tmp_path):
    """Sums of sequences, means per sequence or token, over steps; the last bin may be short."""
    write_archive([read_study_run(study / "wide")], tmp_path)
    (found,) = read_archive(tmp_path)
    run = read_study_run(study / "wide")
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
    write_archive([read_study_run(folder)], archive)
    return read_archive(archive)[0]


def rows_in(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_bin_that_holds_steps_before_a_branch_point_does_not_count(study, tmp_path):
    run = of_archive(study / "gapo-0", tmp_path)
    assert min(correlation_since(run, 50)) == 50 + 9  # a tenth of 100 steps are two bins
    run.metrics["per_c/correct/ratio_deviation/c1"][54] = 1.0  # of steps 50 to 54
    found = correlation_since(run, 52)
    assert list(found) == list(range(64, 100, BIN_STEPS))
    assert list(found.values()) == pytest.approx([1.0] * len(found), abs=1e-4)


def test_settings_stay_what_they_were(study, tmp_path, monkeypatch):
    """Whatever presets and defaults are later."""
    run = read_study_run(study / "gapo-0")
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
    run = read_study_run(write_run(tmp_path / "run", *widths, method=method))
    write_archive([run], tmp_path / "archive")
    assert read_archive(tmp_path / "archive")[0].method == preset


def test_names_tell_runs_apart(study, tmp_path):
    run = read_study_run(study / "wide")
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
    write_archive([read_study_run(study / "wide")], tmp_path)
    path = tmp_path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=words):
        read_archive(tmp_path)


def test_a_missing_file_is_named(study, tmp_path):
    write_archive([read_study_run(study / "wide")], tmp_path)
    (tmp_path / "timings.csv").unlink()
    with pytest.raises(DataError, match=mentions(tmp_path / "timings.csv")):
        read_archive(tmp_path)


def test_an_archive_executes_nothing(study, tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    named = f"{tmp_path}/own.py:METHOD"
    run = read_study_run(study / "wide")
    write_archive([run], tmp_path / "archive")
    rows = tmp_path / "archive" / "runs.csv"
    assert rows.read_text().count('""method"":""gapo""') == 1
    rows.write_text(rows.read_text().replace('""method"":""gapo""', f'""method"":""{named}""'))
    with pytest.raises(DataError, match=r"runs\.csv:2.*own\.py"):
        read_archive(tmp_path / "archive")
    assert not (tmp_path / "executed").exists()


def test_frozen_code_is_told_apart(
    checkout: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """By its commit; beyond that by the package's files, wherever the copy lies."""
    commit = git(checkout, "rev-parse", "HEAD")[:12]
    freeze(checkout, tmp_path / "clean", config="")
    assert frozen_code(tmp_path / "clean") == commit
    found = []
    for number, text in enumerate(("a", "b", "a")):
        (checkout / "gapo_megatron" / "__init__.py").write_text(text)
        freeze(checkout, tmp_path / f"{number}", config="")
        found.append(frozen_code(tmp_path / f"{number}"))
    assert found[0] == found[2] != found[1]
    assert all(re.fullmatch(rf"{commit}\+[0-9a-f]{{8}}", one) for one in found)
    shutil.rmtree(checkout / ".git")
    freeze(checkout, tmp_path / "unknown", config="")
    assert frozen_code(tmp_path / "unknown") == found[0].removeprefix(commit)


@pytest.mark.parametrize("text", ["", "[]", '{"commit": 3}'])
def test_a_damaged_origin_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "code.json").write_text(text)
    with pytest.raises(DataError, match=mentions(tmp_path / "code.json")):
        frozen_code(tmp_path)
