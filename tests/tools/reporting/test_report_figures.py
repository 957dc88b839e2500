"""What figures and tables show: the data behind them, and what they say where it is missing."""

from __future__ import annotations

import csv
import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from gapo_megatron.evaluate.counts import read_counts
from gapo_tools.reporting.gains import gain, read_first_and_last, with_bounds
from gapo_tools.reporting.report import MAKERS, note_missing
from gapo_tools.reporting.series import NoData
from gapo_tools.reporting.style import panels, style, widen
from tests.report_setup import (
    NUM_PROBLEMS,
    NUM_STEPS,
    ROUNDING,
    SIGNAL,
    clipped,
    clipped_tokens,
    clocks_apart,
    compare,
    deviation,
    length,
    num_sequences,
    pass_at,
    rows_of,
    solved,
    t_interval,
    write_run,
)

FIGURES = {make.__name__: make for make in MAKERS.values()}
METHODS = ("gapo", "gspo_asym", "dr_grpo")
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def exhibits(tmp_path_factory):
    """Of three methods of three seeds."""
    root = tmp_path_factory.mktemp("study")
    comparison = compare(
        *(write_run(root / f"{m}_{seed}", method=m, seed=seed) for m in METHODS for seed in SEEDS)
    )
    with style():
        return {name: make(comparison) for name, make in FIGURES.items()}


def finals(method, place=0):
    return [pass_at(method, seed, NUM_STEPS)[place] for seed in SEEDS]


def test_accuracy_is_the_mean_over_seeds_with_its_interval(exhibits):
    exhibit = exhibits["over_training"]
    for method in METHODS:
        for place, quantity in enumerate(("pass@1 (%)", "pass@8 (%)")):
            rows = rows_of(exhibit, arm=method, quantity=quantity)
            assert [row["step"] for row in rows] == [0, 20, 40]
            for row in rows:
                values = [pass_at(method, seed, row["step"])[place] for seed in SEEDS]
                found = (row["mean"], row["low"], row["high"])
                assert found == pytest.approx((np.mean(values), *t_interval(values)))
                assert row["seeds"] == len(SEEDS)
    panels = {axis.get_ylabel(): axis for axis in exhibit.figure.axes}
    lines = {line.get_label(): line for line in panels["pass@8 (%)"].get_lines()}
    assert lines["gapo"].get_ydata()[-1] == pytest.approx(100 * np.mean(finals("gapo", 1)))
    row = rows_of(exhibit, arm="gapo", quantity="Pearson r")[-1]
    found = (row["mean"], row["low"], row["high"])
    assert found == pytest.approx((0.8, *t_interval([0.9, 0.8, 0.7])))
    assert len(panels["Pearson r"].collections) == 3  # bands


def tokens_clipped(c, seed, steps):
    """Share of all tokens of these steps that are clipped."""
    tokens = {step: num_sequences(c, step) * length(c, step) for step in steps}
    return sum(tokens[s] * clipped_tokens(c, seed, s) for s in steps) / sum(tokens.values())


def deviation_of_rollouts(c, seed, steps):
    """Mean over all rollouts of these steps."""
    weights = [num_sequences(c, step) for step in steps]
    return np.average([deviation(c, 8, seed, s, "gspo_asym") for s in steps], weights=weights)


@pytest.mark.parametrize(
    ("name", "mean"),
    [("deviation_per_c", deviation_of_rollouts), ("clip_fraction_per_c", tokens_clipped)],
)
def test_curves_per_c_are_weighted_means(exhibits, name, mean):
    for c in range(1, 8):
        row = rows_of(exhibits[name], arm="gspo_asym", c=c)[-1]
        means = [mean(c, seed, range(36, 40)) for seed in SEEDS]
        assert (row["step"], row["mean"]) == (39, pytest.approx(np.mean(means)))
        assert (row["low"], row["high"]) == pytest.approx(t_interval(means))
    assert [axis.get_title() for axis in exhibits[name].figure.axes] == list(METHODS)


def test_groups_add_up_to_all(exhibits):
    exhibit = exhibits["groups_per_c"]
    shares = [rows_of(exhibit, arm="gapo", step=20, c=c)[0]["mean"] for c in range(9)]
    assert sum(shares) == pytest.approx(1)
    top = exhibit.figure.axes[0].collections[-1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(100)


def test_each_run_has_its_gain_over_the_problems_with_its_interval(exhibits, tmp_path):
    exhibit = exhibits["before_and_after"]
    assert len(exhibit.rows) == len(exhibit.table.rows) == len(METHODS) * len(SEEDS)
    for method in METHODS:
        for seed in SEEDS:
            before, after = (
                [solved(method, seed, step, problem) / 8 for problem in range(NUM_PROBLEMS)]
                for step in (0, NUM_STEPS)
            )
            gains = [b - a for a, b in zip(before, after, strict=True)]
            (row,) = rows_of(exhibit, arm=method, seed=seed)
            assert (row["first step"], row["last step"]) == (0, NUM_STEPS)
            assert row["pass@1 after"] - row["pass@1 before"] == pytest.approx(row["gain"])
            assert row["gain"] == pytest.approx(np.mean(gains), abs=1e-12)
            if np.ptp(gains) > 1e-9:
                assert (row["gain low"], row["gain high"]) == pytest.approx(t_interval(gains))
    folder = write_run(tmp_path / "once", num_steps=3)
    with pytest.raises(NoData, match="evaluated twice"):
        FIGURES["before_and_after"](compare(folder))


def test_a_problem_without_a_verdict_is_in_no_gain(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "evaluations" / "step_40.json"
    whole = FIGURES["before_and_after"](compare(folder)).rows[0]
    problems = json.loads(path.read_text())
    problems["problems"][0] |= {"num_samples": 0, "num_correct": 0}
    path.write_text(json.dumps(problems))
    (row,) = FIGURES["before_and_after"](compare(folder)).rows
    gains = [(solved("gapo", 0, 40, i) - solved("gapo", 0, 0, i)) / 8 for i in (1, 2, 3, 4)]
    assert row["gain"] == pytest.approx(np.mean(gains)) != whole["gain"]


@pytest.mark.parametrize("num_known", [0, 1])
def test_of_fewer_than_two_problems_there_is_no_gain(tmp_path, num_known):
    """Such as after an evaluation whose judge was down."""
    folder = write_run(tmp_path / "run")
    path = folder / "evaluations" / "step_40.json"
    problems = json.loads(path.read_text())
    for one in problems["problems"][num_known:]:
        one |= {"num_samples": 0, "num_correct": 0}
    path.write_text(json.dumps(problems))
    assert read_first_and_last(folder) is None
    with pytest.raises(NoData, match="verdicts of two"):
        FIGURES["before_and_after"](compare(folder))
    whole = [read_counts(path.with_name(f"step_{step}.json")) for step in (0, 20)]
    assert with_bounds(gain(tuple(counts[:num_known] for counts in whole))) == "-"


def test_the_clip_stands_beside_its_width(exhibits, tmp_path):
    """GAPO's falls with c, that of others does not; those that find theirs have none."""
    found = FIGURES["clip_by_c"](compare(write_run(tmp_path / "m", method="m2po")))
    assert {row["upper"] for row in found.rows} == {None}
    for method, (low, high) in {"gapo": (0.01, 0.0167), "gspo_asym": (0.0167, 0.0167)}.items():
        rows = rows_of(exhibits["clip_by_c"], arm=method)
        assert [row["c"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
        for row in rows:
            c = row["c"]
            assert row["upper"] == pytest.approx(low + (high - low) * (8 - c) / 7)
            assert row["mean"] == pytest.approx(np.mean([clipped(c, seed) for seed in SEEDS]))


def test_labels_hold_no_formulas(tmp_path):
    """`style` has them drawn as they are; a logarithmic axis has formulas by default."""
    wide = write_run(tmp_path / "wide", "objective.eps_high_max=0.2", method="grpo")
    with style():
        figure = FIGURES["clip_by_c"](compare(write_run(tmp_path / "a"), wide)).figure
        figure.draw_without_rendering()
    assert figure.axes[0].get_yscale() == "log"
    labels = [one.get_text() for one in figure.axes[0].get_yticklabels(which="both")]
    assert "10" in labels and not any("$" in one for one in labels)


@pytest.mark.parametrize(("low", "high"), [(95, 99), (0, 3), (40, 50), (10, 90)])
def test_an_axis_of_shares_spans_twenty_points_at_least(low, high):
    _, (axis,) = panels(1)
    axis.plot([0, 1], [low, high])
    widen(axis, least=20, limits=(0, 100))
    bottom, top = axis.get_ylim()
    assert 0 <= bottom <= low and high <= top <= 100
    assert top - bottom >= min(20, 100) - 1e-9


def test_a_run_shorter_than_the_window_leaves_the_others_their_curves(tmp_path):
    folders = [
        write_run(tmp_path / "long", method="gapo"),
        write_run(tmp_path / "k", "batch.rollouts_per_prompt=16", method="gspo", num_steps=2),
    ]
    comparison = compare(*folders)
    for name in ("groups_per_c", "deviation_per_c"):
        exhibit = note_missing(FIGURES[name](comparison), comparison)
        assert {row["arm"] for row in exhibit.rows} == {"gapo"}
        assert exhibit.notes[-1] == "No data: gspo k=16."


def test_each_side_has_a_bar_and_its_waiting(exhibits, tmp_path):
    """Training's sync is longer than generation's by what it waits: 1 s on average."""
    (rollout,) = rows_of(exhibits["step_time"], arm="gapo", stage="rollout")
    assert (rollout["side"], rollout["seconds"]) == ("", pytest.approx(0.5))
    assert rollout["share"] == pytest.approx(2 / 3)
    folders = [
        write_run(tmp_path / "apart", num_steps=10, clocks=clocks_apart()),
        write_run(tmp_path / "together", method="gspo", num_steps=10),
    ]
    with style():
        exhibit = FIGURES["step_time"](compare(*folders))
    found = {
        side: {row["stage"]: row["seconds"] for row in rows_of(exhibit, arm="gapo", side=side)}
        for side in ("training", "generation")
    }
    training = {"wait": 5.0, "old_log_probs": 1.0, "update": 3.5, "sync": 0.25, "other": 0.25}
    generation = {"rollout": 7.0, "reward": 0.5, "sync": 0.25, "wait": 2.25, "other": 0.0}
    assert found == {"training": pytest.approx(training), "generation": pytest.approx(generation)}
    (axis,) = exhibit.figure.axes
    bars = [label.get_text() for label in axis.get_yticklabels()]
    assert bars == ["gapo, training", "gapo, generation", "gspo"]
    ends = {}  # of each bar
    for patch in axis.patches:
        place = round(patch.get_y() + patch.get_height() / 2)
        ends[place] = max(ends.get(place, 0.0), patch.get_x() + patch.get_width())
    assert ends == pytest.approx({0: 10.0, 1: 10.0, 2: 0.75})
    assert "gapo, training waits 50% of a step." in exhibit.notes


def test_rounding_stands_beside_the_step_and_the_clips(exhibits, tmp_path):
    exhibit = exhibits["rounding"]
    (row,) = rows_of(exhibit, method="gapo")
    rms = math.sqrt((1 + 4 + 9) / 3)  # seeds 0 to 2 have once, twice, three times of it
    assert (row["signal"], row["rounding"]) == pytest.approx((SIGNAL * rms, ROUNDING * rms))
    assert (row["changed"], row["routes"]) == (pytest.approx(0.02), None)
    line = dict(zip(exhibit.table.columns, exhibit.table.rows[0], strict=True))
    assert (line["eps_low"], line["eps_high_max"]) == ("0.01", "0.017")
    assert "routes" not in line  # dense
    no_band = FIGURES["rounding"](compare(write_run(tmp_path / "none", method="cispo"))).rows[0]
    assert (no_band["eps_low"], no_band["eps_high_max"]) == (None, None)


def test_the_summary_compares_with_the_first(exhibits):
    exhibit = exhibits["summary"]
    columns = exhibit.table.columns
    lines = {row[0]: dict(zip(columns, row, strict=True)) for row in exhibit.table.rows}
    assert list(lines) == list(METHODS)
    ours, theirs = finals("gapo"), finals("gspo_asym")
    pairs = np.subtract(ours, theirs)
    half = pairs.mean() - t_interval(pairs)[0]
    (row,) = rows_of(exhibit, method="gspo_asym")
    found = [row[f"pass@1 difference {bound}"] for bound in ("mean", "low", "high")]
    assert found == pytest.approx([np.mean(pairs), *t_interval(pairs)])
    places = [place for place, name in enumerate(columns) if name == "gapo - row"]
    assert exhibit.table.rows[1][places[0]] == f"{100 * pairs.mean():+.2f}±{100 * half:.2f}"
    assert exhibit.table.rows[0][places[0]] == "-"
    half = np.mean(ours) - t_interval(ours)[0]
    assert lines["gapo"]["pass@1 (%)"] == f"{100 * np.mean(ours):.2f}±{100 * half:.2f}"
    assert (lines["gapo"]["seeds"], lines["gapo"]["steps"], lines["gapo"]["k"]) == ("3", "40", "8")
    assert lines["gapo"]["hours"] == f"{66 / 3600:.2f}"


@pytest.mark.parametrize(("seeds", "shared"), [((1, 2, 3), (1, 2)), ((3, 4), ())])
def test_the_seeds_that_both_have_are_paired(tmp_path, seeds, shared):
    folders = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in SEEDS]
    folders += [write_run(tmp_path / f"b{seed}", method="gspo", seed=seed) for seed in seeds]
    (row,) = rows_of(FIGURES["summary"](compare(*folders)), method="gspo")
    ours, theirs = (
        {seed: pass_at(method, seed, NUM_STEPS)[0] for seed in used}
        for method, used in (("gapo", SEEDS), ("gspo", seeds))
    )
    expected, low = np.mean([*ours.values()]) - np.mean([*theirs.values()]), None
    if shared:
        pairs = [ours[seed] - theirs[seed] for seed in shared]
        expected = np.mean(pairs)
        low = pytest.approx(stats.t.interval(0.95, 1, expected, stats.sem(pairs))[0])
    assert row["pass@1 difference mean"] == pytest.approx(expected)
    assert row["pass@1 difference low"] == low


def test_other_steps_are_not_compared(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", method="gspo", num_steps=30)]
    exhibit = FIGURES["summary"](compare(*folders))
    line = dict(zip(exhibit.table.columns, exhibit.table.rows[1], strict=True))
    assert (line["gapo - row"], line["steps"]) == ("-", "30 of 40")
    assert exhibit.rows[1]["pass@1 step"] == 20


def test_what_does_not_spread_has_no_interval(tmp_path):
    """Saturated seeds."""
    methods = METHODS[:2]
    folders = [write_run(tmp_path / f"{m}_{s}", method=m, seed=s) for m in methods for s in SEEDS]
    for folder in folders:
        level = "1.0" if "gapo" in folder.name else str(255 / 256)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        text = "".join(re.sub(r'(pass@\d": )[\d.]+', rf"\g<1>{level}", one) + "\n" for one in lines)
        (folder / "metrics.jsonl").write_text(text)
    exhibit = FIGURES["summary"](compare(*folders))
    assert [row[6:8] for row in exhibit.table.rows] == [["100.00", "-"], ["99.61", "+0.39"]]
    assert exhibit.rows[1]["pass@1 difference low"] is None


def test_files_hold_what_is_drawn(exhibits, tmp_path):
    """Of tables, and of a figure: all are written in one way."""
    with style():
        for name in ("summary", "rounding", "step_time"):
            exhibit = exhibits[name]
            kinds = {path.suffix for path in exhibit.write(tmp_path / name)}
            assert kinds == {".csv"} if exhibit.table else {".csv", ".png", ".pdf"}
            with (tmp_path / f"{name}.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
            expected = [
                {key: "" if value is None else str(value) for key, value in row.items()}
                for row in exhibit.rows
            ]
            assert rows == expected
    assert (tmp_path / "step_time.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("name", "kept", "reason"),
    [
        ("over_training", ("time/",), "evaluations"),
        ("clip_fraction_per_c", ("reward/",), "per_c/correct/clip_fraction_tokens"),
        ("rounding", ("reward/",), "rounding_every_steps"),
        ("clip_by_c", ("reward/",), "clip_fraction_sequences"),
        ("health", ("reward/mean", "time/"), "optim/grad_norm"),
    ],
)
def test_what_runs_have_no_data_for_says_why(tmp_path, name, kept, reason):
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    cut = [{k: v for k, v in row.items() if k == "step" or k.startswith(kept)} for row in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cut))
    with pytest.raises(NoData, match=reason):
        FIGURES[name](compare(folder))
