"""Tables and ablations: what a report says in numbers, and of what it may say that it differs."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy import stats

from gapo_megatron.ops.report.outcomes import clip_sweep, others, over_k, summary
from gapo_megatron.ops.report.series import NoData
from gapo_megatron.ops.report.style import style
from tests.report_setup import (
    NUM_STEPS,
    compare,
    pass_at,
    rows_of,
    t_interval,
    write_run,
    write_study,
)

METHODS = ("gapo", "gspo_asym")
SEEDS = (0, 1, 2)
CLIP_03 = "objective.eps_high_max=0.03"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two methods of three seeds, and of one seed with another k and with another clip."""
    return write_study(tmp_path_factory.mktemp("study"), METHODS, SEEDS)


@pytest.fixture(scope="module")
def exhibits(study):
    with style():
        return {make.__name__: make(study) for make in (summary, others, over_k, clip_sweep)}


def paired_text():
    """gapo - gspo_asym in points, with half the interval over pairs of seeds."""
    ours, theirs = ([pass_at(method, seed, 40)[0] for seed in SEEDS] for method in METHODS)
    pairs = 100 * np.subtract(ours, theirs)
    return f"{pairs.mean():+.2f}±{pairs.mean() - t_interval(pairs)[0]:.2f}"


def test_ablation_over_k_has_a_line_per_method(exhibits):
    exhibit = exhibits["over_k"]
    assert {(row["method"], row["k"]) for row in exhibit.rows} == {
        (method, k) for method in METHODS for k in (4, 8)
    }
    (row,) = rows_of(exhibit, method="gapo", k=8, metric="pass@1")
    assert row["mean"] == pytest.approx(np.mean([pass_at("gapo", s, 40)[0] for s in SEEDS]))
    assert (row["seeds"], row["step"]) == (3, 40)
    axis = exhibit.figure.axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["4", "8"]
    assert exhibit.figure.legends[0].get_texts()[1].get_text() == "gspo_asym"


def test_clip_sweep_compares_at_equal_clips(exhibits):
    table = exhibits["clip_sweep"].table
    assert table.columns == ["eps_high_max", "0.0167", "0.03"]
    names = ["gapo", "gspo_asym", "gapo over gspo_asym (points)"]
    assert [row[0] for row in table.rows] == names
    ours, theirs = (pass_at(method, 0, 40)[0] for method in METHODS)
    assert table.rows[0][2] == f"{100 * ours:.2f}"
    assert table.rows[2][2] == f"{100 * (ours - theirs):+.2f}"  # one seed
    assert "±" in table.rows[0][1]
    assert table.rows[2][1] == paired_text()


def test_symmetric_gspo_is_the_uniform_clip_at_its_width(tmp_path):
    folders = [
        write_run(tmp_path / "a", "objective.eps_high_max=0.01", method="gspo"),
        write_run(tmp_path / "b", method="gspo_asym"),
    ]
    exhibit = clip_sweep(compare(*folders))
    assert exhibit.table.columns[1:] == ["0.01", "0.0167"]
    assert [row[0] for row in exhibit.table.rows] == ["gspo, gspo_asym"]


def test_summary_tests_against_the_first(exhibits):
    exhibit = exhibits["summary"]
    columns = exhibit.table.columns
    lines = {row[0]: dict(zip(columns, row, strict=True)) for row in exhibit.table.rows}
    assert next(iter(lines)) == "gapo"
    ours, theirs = ([pass_at(m, s, 40)[0] for s in SEEDS] for m in METHODS)
    p_value = stats.ttest_ind(ours, theirs, equal_var=False).pvalue
    (row,) = rows_of(exhibit, method="gspo_asym")
    assert row["pass@1 p"] == pytest.approx(p_value)
    marks = "*" * sum(p_value < level for level in (0.05, 0.01, 0.001))
    assert marks  # or this test shows little
    assert lines["gspo_asym"]["gapo - row"] == f"{paired_text()}{marks}"
    found = (row["pass@1 difference"], row["pass@1 difference low"], row["pass@1 difference high"])
    pairs = np.subtract(ours, theirs)
    assert found == pytest.approx((np.mean(pairs), *t_interval(pairs)))
    half = np.mean(ours) - t_interval(ours)[0]
    assert lines["gapo"]["pass@1 (%)"] == f"{100 * np.mean(ours):.2f}±{100 * half:.2f}"
    assert lines["gapo"]["gapo - row"] == "-"
    assert list(lines) == list(METHODS)
    assert (lines["gapo"]["seeds"], lines["gapo"]["steps"], lines["gapo"]["k"]) == ("3", "40", "8")
    assert lines["gapo"]["hours"] == f"{66 / 3600:.2f}"


def test_other_steps_are_not_compared(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", method="gspo", num_steps=30)]
    exhibit = summary(compare(*folders))
    line = dict(zip(exhibit.table.columns, exhibit.table.rows[1], strict=True))
    assert (line["gapo - row"], line["steps"]) == ("-", "30 of 40")
    assert exhibit.rows[1]["pass@1 step"] == 20


def test_other_settings_have_a_table_of_their_own(exhibits, tmp_path):
    table = exhibits["others"].table
    labels = [f"{method} {what}" for method in METHODS for what in ("k=4", "eps_high_max=0.03")]
    assert [row[0] for row in table.rows] == labels
    assert not any("*" in cell for row in table.rows for cell in row)
    assert not any(column.endswith("- row") for column in table.columns)
    with pytest.raises(NoData, match="one setting"):
        others(compare(write_run(tmp_path / "a")))


def test_what_does_not_spread_has_no_interval_and_no_star(tmp_path):
    """Saturated seeds."""
    folders = [write_run(tmp_path / f"{m}_{s}", method=m, seed=s) for m in METHODS for s in SEEDS]
    for folder in folders:
        level = "1.0" if "gapo" in folder.name else str(255 / 256)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        text = "".join(re.sub(r'(pass@\d": )[\d.]+', rf"\g<1>{level}", one) + "\n" for one in lines)
        (folder / "metrics.jsonl").write_text(text)
    exhibit = summary(compare(*folders))
    assert [row[6:10] for row in exhibit.table.rows] == [
        ["100.00", "-", "100.00", "-"],
        ["99.61", "+0.39", "99.61", "+0.39"],
    ]
    (row,) = rows_of(exhibit, method="gspo_asym")
    assert (row["pass@1 p"], row["pass@1 difference low"]) == (None, None)


@pytest.mark.parametrize(("seeds", "shared"), [((1, 2, 3), (1, 2)), ((3, 4), ())])
def test_the_seeds_that_both_have_are_paired(tmp_path, seeds, shared):
    folders = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in (0, 1, 2)]
    folders += [write_run(tmp_path / f"b{seed}", method="gspo", seed=seed) for seed in seeds]
    (row,) = rows_of(summary(compare(*folders)), method="gspo")
    ours, theirs = (
        {seed: pass_at(method, seed, NUM_STEPS)[0] for seed in used}
        for method, used in (("gapo", (0, 1, 2)), ("gspo", seeds))
    )
    assert row["pass@1 p"] == pytest.approx(
        stats.ttest_ind([*ours.values()], [*theirs.values()], equal_var=False).pvalue
    )
    if not shared:
        expected = np.mean([*ours.values()]) - np.mean([*theirs.values()])
        assert row["pass@1 difference"] == pytest.approx(expected)
        assert row["pass@1 difference low"] is None
        return
    differences = [ours[seed] - theirs[seed] for seed in shared]
    low, _ = stats.t.interval(0.95, 1, np.mean(differences), stats.sem(differences))
    assert row["pass@1 difference"] == pytest.approx(np.mean(differences))
    assert row["pass@1 difference low"] == pytest.approx(low)


def test_runs_under_way_have_no_ablation_before_all_seeds_are_evaluated(tmp_path):
    """One seed of each arm has no evaluation yet."""
    folders = []
    for number, more in enumerate([(), ("batch.rollouts_per_prompt=4",), (CLIP_03,)]):
        folders += [write_run(tmp_path / f"{number}{seed}", *more, seed=seed) for seed in (0, 1)]
    for folder in folders[1::2]:
        text = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(text.replace("eval/", "later/"))
    for make in (over_k, clip_sweep):
        with pytest.raises(NoData, match="seeds"):
            make(compare(*folders))


def test_families_of_one_method_do_not_replace_each_other(tmp_path):
    """Two values of what is no part of the method, each swept: two rows."""
    folders = []
    for value in ("1e-5", "1e-4"):
        for clip in ("0.0167", "0.03"):
            name = tmp_path / f"{value}_{clip}"
            more = (f"optimizer.learning_rate={value}", f"objective.eps_high_max={clip}")
            folders.append(write_run(name, *more))
    table = clip_sweep(compare(*folders)).table
    other = "gapo learning_rate=0.0001"
    assert [row[0] for row in table.rows] == ["gapo", other, f"gapo over {other} (points)"]
