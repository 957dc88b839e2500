"""What figures show: the data behind them, names, units, notes."""

from __future__ import annotations

import csv
import json
import math
import re

import numpy as np
import pytest
from matplotlib import image

from gapo_megatron.evaluate.heat_map import difference_limit
from gapo_megatron.ops.report import style
from gapo_megatron.ops.report.archive import read_archive, write_archive
from gapo_megatron.ops.report.arms import Comparison
from gapo_megatron.ops.report.learning import OTHER
from gapo_megatron.ops.report.picture import draw_picture, write_picture
from gapo_megatron.ops.report.report import MAKERS, note_missing
from gapo_megatron.ops.report.runs import read_run
from gapo_megatron.ops.report.series import NoData, windowed
from tests.report_setup import (
    NUM_PROBLEMS,
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
    write_study,
)

FIGURES = {make.__name__: make for make in MAKERS.values()}
METHODS = ("gapo", "gspo_asym", "dr_grpo")
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Three methods of three seeds, two with another k, and two with another clip."""
    return write_study(tmp_path_factory.mktemp("study"), METHODS, SEEDS)


@pytest.fixture(scope="module")
def exhibits(study):
    with style.style():
        return {name: make(study) for name, make in FIGURES.items() if name != "intervention"}


def lines_of(axis):
    return {line.get_label(): line for line in axis.get_lines()}


def test_pass_at_k_is_the_mean_over_seeds_with_its_interval(exhibits):
    exhibit = exhibits["pass_at_k"]
    for method in METHODS:
        for place, metric in enumerate(("pass@1", "pass@8")):
            rows = rows_of(exhibit, arm=method, metric=metric)
            assert [row["step"] for row in rows] == [0, 20, 40]
            for row in rows:
                values = [pass_at(method, seed, row["step"])[place] for seed in SEEDS]
                found = (row["mean"], row["low"], row["high"])
                assert found == pytest.approx((np.mean(values), *t_interval(values)))
    axes = exhibit.figure.axes
    assert [axis.get_ylabel() for axis in axes] == ["pass@1 (%)", "pass@8 (%)"]
    drawn = lines_of(axes[1])["gapo"].get_ydata()
    expected = [100 * np.mean([pass_at("gapo", s, step)[1] for s in SEEDS]) for step in (0, 20, 40)]
    assert drawn == pytest.approx(expected)


@pytest.mark.parametrize(("start", "first"), [(0, 3), (600, 603)])
def test_a_curve_starts_where_its_window_is_full(start, first):
    values = {step: float(step) for step in range(start, start + 8)}
    found = windowed(values, list(values), 4)
    assert list(found) == list(range(first, start + 8))
    assert found[first] == start + 1.5


def test_a_run_shorter_than_the_window_leaves_the_others_their_curves(tmp_path):
    folders = [
        write_run(tmp_path / "long", method="gapo"),
        write_run(tmp_path / "k", "batch.rollouts_per_prompt=16", method="gspo", num_steps=2),
    ]
    comparison = compare(*folders)
    for name in ("spectrum", "deviation_per_c"):
        assert {row["arm"] for row in FIGURES[name](comparison).rows} == {"gapo"}


def tokens_clipped(c, seed, steps):
    """Share of all tokens of these steps that are clipped."""
    tokens = {step: num_sequences(c, step) * length(c, step) for step in steps}
    return sum(tokens[s] * clipped_tokens(c, seed, s) for s in steps) / sum(tokens.values())


def deviation_of_rollouts(c, seed, steps):
    """Mean over all rollouts of these steps."""
    weights = [num_sequences(c, step) for step in steps]
    return np.average([deviation(c, 8, seed, s, "gspo_asym") for s in steps], weights=weights)


def test_curves_per_c_are_weighted_means(exhibits):
    """Deviations by rollouts; the paper's clip fraction by tokens."""
    for name, mean in {
        "deviation_per_c": deviation_of_rollouts,
        "clip_fraction_per_c": tokens_clipped,
    }.items():
        for c in range(1, 8):
            row = rows_of(exhibits[name], arm="gspo_asym", c=c)[-1]
            means = [mean(c, seed, range(36, 40)) for seed in SEEDS]
            assert (row["step"], row["mean"]) == (39, pytest.approx(np.mean(means)))
            assert (row["low"], row["high"]) == pytest.approx(t_interval(means))


def test_clipped_rollouts_are_counted_where_a_run_has_not_counted_tokens(exhibits, tmp_path):
    counts_tokens = exhibits["clip_fraction_per_c"]
    assert {axis.get_ylabel() for axis in counts_tokens.figure.axes} == {"tokens clipped (%)", ""}
    folder = write_run(tmp_path / "old", method="gapo")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace("clip_fraction_tokens", "of_later_versions"))
    exhibit = FIGURES["clip_fraction_per_c"](compare(folder))
    assert [axis.get_ylabel() for axis in exhibit.figure.axes] == ["rollouts clipped (%)"]
    assert rows_of(exhibit, c=3)[-1]["mean"] == pytest.approx(clipped(3, 0))
    assert exhibit.aid != counts_tokens.aid and exhibit.notes[0] != counts_tokens.notes[0]


RATIOS = ("sequence", "token")


def test_ratios_of_tokens_are_quantities_of_their_own(exhibits):
    """dr_grpo is here the only method with token ratios."""
    by_c = exhibits["by_c"]
    titles = [re.sub(r"\s+", " ", axis.get_title()) for axis in by_c.figure.axes]
    moved = [f"{word}, {ratio} ratio" for word in ("drift", "deviation") for ratio in RATIOS]
    assert titles == ["clip fraction", *moved]
    drift, deviation = (
        rows_of(by_c, quantity=f"{word}, sequence ratio", arm="gapo", c=2)[0]["mean"]
        for word in ("drift", "deviation")
    )
    assert drift == pytest.approx(3 * deviation)
    assert {row["arm"] for row in rows_of(by_c, quantity="deviation, token ratio")} == {"dr_grpo"}
    (row,) = rows_of(by_c, quantity="clip fraction", arm="gapo", c=3)
    assert row["mean"] == pytest.approx(np.mean([clipped(3, s) for s in SEEDS]))


def test_correlation_is_the_recorded_one(exhibits):
    row = rows_of(exhibits["correlation"], arm="gapo")[-1]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx(
        (0.8, *t_interval([0.9, 0.8, 0.7]))
    )
    assert rows_of(exhibits["correlation"], arm="gapo")[0]["step"] == 0


def test_spectrum_adds_up_to_all_groups(exhibits):
    exhibit = exhibits["spectrum"]
    shares = [rows_of(exhibit, arm="gapo", step=20, c=c)[0]["mean"] for c in range(9)]
    assert sum(shares) == pytest.approx(1)
    top = exhibit.figure.axes[0].collections[-1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(100)


def test_heat_map_is_the_difference_of_mean_solve_rates(exhibits):
    exhibit = exhibits["solve_rates"]
    (panel, *_) = exhibit.figure.axes
    assert panel.get_title() == "gapo - gspo_asym"
    drawn = panel.get_images()[0].get_array()
    order = [row["problem"] for row in rows_of(exhibit, other="gspo_asym", step=0)]
    assert order == [f"p{i}" for i in range(NUM_PROBLEMS)]  # the easiest first
    for i in range(NUM_PROBLEMS):
        for place, step in enumerate((0, 20, 40)):
            ours, theirs = (
                np.mean([solved(method, seed, step, i) / 8 for seed in SEEDS])
                for method in METHODS[:2]
            )
            (row,) = rows_of(exhibit, other="gspo_asym", step=step, problem=f"p{i}")
            assert row["difference"] == pytest.approx(ours - theirs)
            assert drawn[i, place] == pytest.approx(100 * (ours - theirs))
    shown = [image for axis in exhibit.figure.axes for image in axis.get_images()]
    (bar,) = [image.colorbar for image in shown if image.colorbar]
    size = np.percentile([abs(row["difference"]) for row in exhibit.rows], 98)
    assert -1e-9 < bar.vmax / 100 - size < 0.05


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ([0.25] * 99 + [1.0], 0.25),  # not the worst
        ([0.01] * 100, 0.1),
        ([-0.33] * 100, 0.35),
        ([math.nan], 0.1),
    ],
)
def test_a_scale_of_differences_holds_most(values, limit):
    assert difference_limit(np.array(values)) == pytest.approx(limit)


def test_heat_map_is_of_the_seeds_that_both_have(tmp_path):
    arms = (("gapo", 0), ("gapo", 1), ("gspo_asym", 1), ("gspo_asym", 2), ("dr_grpo", 2))
    folders = [write_run(tmp_path / f"{m}_{seed}", method=m, seed=seed) for m, seed in arms]
    exhibit = FIGURES["solve_rates"](compare(*folders))
    for i in range(NUM_PROBLEMS):
        (row,) = rows_of(exhibit, other="gspo_asym", step=40, problem=f"p{i}")
        ours, theirs = (solved(method, 1, 40, i) / 8 for method in METHODS[:2])
        assert row["difference"] == pytest.approx(ours - theirs)
        (row,) = rows_of(exhibit, other="dr_grpo", step=40, problem=f"p{i}")  # none is shared
        ours = (solved("gapo", 0, 40, i) + solved("gapo", 1, 40, i)) / 16
        assert row["difference"] == pytest.approx(ours - solved("dr_grpo", 2, 40, i) / 8)


def test_problems_solved_late_are_counted_over_seeds(tmp_path):
    """Above 5 %, in the evaluations of the last eight of 40 steps; no verdict is not solved."""
    counts = {
        0: {20: [20] * 5, 36: [1, 2, 20, 0, 0], 40: [2, 2, 2, 0, 0]},  # solved: (2 + 3) / 2
        1: {20: [20] * 5, 36: [0, 0, 0, 0, 2], 40: [1, 1, 1, 2, 3]},  # (1 + 2) / 2
    }
    folders = []
    for seed, by_step in counts.items():
        folders.append(write_run(tmp_path / f"gapo_{seed}", method="gapo", seed=seed))
        for step, correct in by_step.items():
            problems = [
                {"id": f"p{i}", "level": "", "num_samples": 20 if n else 0, "num_correct": n}
                for i, n in enumerate(correct)
            ]
            path = folders[-1] / "evaluations" / f"step_{step}.json"
            path.write_text(json.dumps({"problems": problems}))
    folders.append(write_run(tmp_path / "gspo", method="gspo"))
    (note,) = (one for one in FIGURES["solve_rates"](compare(*folders)).notes if "5 %" in one)
    half = t_interval([2.5, 1.5])[1] - 2
    assert note.endswith(f"gapo 2.0 ± {half:.1f} of 5, gspo 4.0 of 5.")


def test_methods_that_cannot_be_subtracted_are_named(tmp_path):
    folders = [write_run(tmp_path / method, method=method) for method in METHODS]
    for path in (folders[2] / "evaluations").iterdir():
        path.unlink()
    exhibit = FIGURES["solve_rates"](compare(*folders))
    assert exhibit.notes[-1] == "No data: dr_grpo."


def test_time_of_a_step_adds_up(exhibits):
    exhibit = exhibits["step_time"]
    (rollout,), (other,) = (rows_of(exhibit, arm="gapo", stage=s) for s in ("rollout", "other"))
    assert (rollout["seconds"], other["seconds"]) == pytest.approx((0.5, 0.25))
    assert rollout["share"] == pytest.approx(2 / 3)


def apart(tmp_path, *, methods=("gapo",), together=()):
    """Runs with generation ranks, and without."""
    options = {name: {"clocks": clocks_apart()} for name in methods} | {one: {} for one in together}
    folders = [
        write_run(tmp_path / name, method=name, num_steps=10, **option)
        for name, option in options.items()
    ]
    return compare(*folders)


def test_each_side_has_a_bar_and_its_waiting(tmp_path):
    """Training's sync is longer than generation's by what it waits: 1 s on average."""
    with style.style():
        exhibit = FIGURES["step_time"](apart(tmp_path, together=["gspo"]))
    found = {
        side: {row["stage"]: row["seconds"] for row in rows_of(exhibit, arm="gapo", side=side)}
        for side in ("training", "generation")
    }
    training = {"wait": 5.0, "old_log_probs": 1.0, "update": 3.5, "sync": 0.25, "other": 0.25}
    generation = {"rollout": 7.0, "reward": 0.5, "sync": 0.25, "wait": 2.25, "other": 0.0}
    assert found == {"training": pytest.approx(training), "generation": pytest.approx(generation)}
    for stages in found.values():
        assert sum(stages.values()) == pytest.approx(10)
    (rollout,) = rows_of(exhibit, arm="gspo", stage="rollout")
    assert (rollout["side"], rollout["seconds"]) == ("", 0.5)
    (axis,) = exhibit.figure.axes
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["gapo, training", "gapo, generation", "gspo"]
    assert exhibit.notes[-1] == "gapo: training waits 50 %, generation waits 22 % of a step."


def test_an_archive_keeps_both_clocks(tmp_path):
    runs = [run for arm in apart(tmp_path).arms for run in arm.runs]
    write_archive(runs, tmp_path / "archive")
    kept = FIGURES["step_time"](Comparison.of(read_archive(tmp_path / "archive")))
    (wait,) = rows_of(kept, side="training", stage="wait")
    assert wait["seconds"] == pytest.approx(5)


def test_rounding_stands_beside_the_step_and_the_clips(exhibits):
    exhibit = exhibits["rounding"]
    (row,) = rows_of(exhibit, arm="gapo")
    rms = math.sqrt((1 + 4 + 9) / 3)  # seeds 0 to 2 have once, twice, three times of it
    assert (row["signal"], row["rounding"]) == pytest.approx((SIGNAL * rms, ROUNDING * rms))
    assert (row["correlation"], row["changed"]) == pytest.approx((0.95, 0.02))
    axis = exhibit.figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == list(METHODS)
    drawn = [one.get_xdata()[0] for one in axis.lines]
    assert drawn == pytest.approx([SIGNAL * rms, ROUNDING * rms])
    clips = {one.get_label(): one.get_segments()[0] for one in axis.collections}
    assert clips["eps_low"][:, 0] == pytest.approx([0.01, 0.01])
    assert clips["eps_high_max"][:, 0] == pytest.approx([0.0167, 0.0167])


def test_routes_stand_beside_rounding_where_there_are_experts(tmp_path):
    """In the report of runs and in that of their archive."""
    dense, sparse = write_run(tmp_path / "dense"), write_run(tmp_path / "sparse", method="gspo")
    lines = [json.loads(line) for line in (sparse / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "reward/mean" in line:  # of a step that trained
            line["experts/same_routes_share"] = 0.875
        if "numerics/ratio_signal" in line:
            line["experts/ratio_by_routes"] = 0.25
    (sparse / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = [read_run(dense), read_run(sparse)]
    write_archive(runs, tmp_path / "archive")
    for comparison in (Comparison.of(runs), Comparison.of(read_archive(tmp_path / "archive"))):
        exhibit = FIGURES["rounding"](comparison)
        found = {row["arm"]: (row["routes"], row["same_routes"]) for row in exhibit.rows}
        assert found == {"gapo": (None, None), "gspo": (0.25, 0.875)}
        assert [one.get_xdata()[1] for one in exhibit.figure.axes[0].lines][2] == 0.25
    assert "routes" not in FIGURES["rounding"](Comparison.of(runs[:1])).rows[0]


def test_widths_that_are_no_distance_from_1_are_not_drawn(tmp_path):
    runs = [write_run(tmp_path / "band"), write_run(tmp_path / "none", method="cispo")]
    band, none = FIGURES["rounding"](compare(*runs)).rows
    assert (band["eps_low"], none["eps_low"], none["eps_high_max"]) == (0.01, None, None)


def test_a_step_that_moves_nothing_can_be_drawn(tmp_path):
    folder = write_run(tmp_path / "run", method="cispo")
    path = folder / "metrics.jsonl"
    path.write_text(re.sub(r'("numerics/ratio_\w+"): [^,}]+', r"\1: 0.0", path.read_text()))
    exhibit = FIGURES["rounding"](compare(folder))
    assert exhibit.rows[0]["rounding"] == 0
    with style.style():
        exhibit.figure.draw_without_rendering()


def test_files_hold_what_is_drawn(exhibits, tmp_path):
    exhibit = exhibits["pass_at_k"]
    with style.style():
        paths = exhibit.write(tmp_path / "pass_at_k")
    assert [path.suffix for path in paths] == [".csv", ".png", ".pdf"]
    with paths[0].open() as file:
        read = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in read] == [row["mean"] for row in exhibit.rows]
    assert "\\begin{tabular}" in exhibits["summary"].write(tmp_path / "s")[1].read_text()


def test_what_runs_have_no_data_for_says_why(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=1)
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    (folder / "timings.jsonl").unlink()
    (folder / "evaluations" / "step_0.json").unlink()
    comparison = compare(folder)
    reasons = {}
    for name, make in FIGURES.items():
        try:
            make(comparison)
        except NoData as reason:
            reasons[name] = str(reason)
    assert set(FIGURES) - set(reasons) == {"summary"}
    assert "evaluat" in reasons["pass_at_k"]
    assert "two methods" in reasons["solve_rates"]
    assert "per_c/correct/clip_fraction_sequences" in reasons["clip_fraction_per_c"]
    picture = draw_picture(comparison)
    assert sum(len(axis.texts) for axis in picture.axes) == 5


def test_a_method_without_data_is_named(tmp_path):
    folders = [write_run(tmp_path / method, method=method) for method in ("gapo", "gspo_asym")]
    (folders[1] / "timings.jsonl").unlink()
    comparison = compare(*folders)
    notes = {
        name: note_missing(FIGURES[name](comparison), comparison).notes
        for name in ("step_time", "correlation", "summary", "solve_rates")
    }
    assert notes.pop("step_time")[-1] == "No data: gspo_asym."
    assert not any("No data" in note for one in notes.values() for note in one)


def test_of_many_methods_each_stands_beside_the_first(tmp_path):
    """In a panel of its own."""
    many = (*METHODS, "grpo", "gspo", "f_grpo", "f_gspo", "gapo_token", "cispo")
    with style.style():
        figure = FIGURES["pass_at_k"](write_study(tmp_path, many, (0, 1))).figure
    axes = figure.axes
    titles = [title for a in axes if (title := a.get_title() or a.get_title(loc="left"))]
    assert titles == list(many[1:]) and len(axes) == 2 * len(titles)
    assert all({"gapo", OTHER} <= lines_of(axis).keys() for axis in axes)


def test_the_picture_has_every_method(tmp_path):
    folders = [write_run(tmp_path / method, method=method) for method in METHODS]
    assert image.imread(write_picture(folders, tmp_path / "out" / "report.png")).shape[2] == 4
    with style.style():
        axes = draw_picture(compare(*folders)).axes
    assert len(axes) == 6
    held_out = [name for name in lines_of(axes[1]) if name[0] != "_"]
    assert held_out == [f"{method} pass@{k}" for k in (1, 8) for method in METHODS]
