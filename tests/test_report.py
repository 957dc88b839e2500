"""The picture of a run: what is read, and what is drawn."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from matplotlib import image

from gapo_megatron.errors import DataError
from gapo_megatron.report import report, write_report


def _run(folder, *, num_steps=40, sign=1.0, seed=0):
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    metrics, timings = [], []
    for step in range(num_steps):
        row = {"step": step, "reward/mean": 0.4 + step / 100}
        for c in range(1, 8):
            row[f"per_c/correct/clip_fraction_sequences/c{c}"] = c / 20
            noise = 0.001 * random.normal()
            row[f"per_c/correct/ratio_deviation/c{c}"] = sign * (8 - c) * 0.01 + noise
        metrics.append(row)
        timings.append(
            {"step": step, "time/rollout_s": 0.5, "time/step_s": 0.75, "time/unix_s": 1e9}
        )
    metrics.append({"step": num_steps - 1, "eval/pass@1": None, "eval/pass@8": 0.9})
    for name, rows in (("metrics", metrics), ("timings", timings)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def _drawn(axis) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines
    }


@pytest.fixture
def figures(monkeypatch):
    made = []

    class Kept(report.Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(report, "Figure", Kept)
    return made


def test_picture_shows_what_the_files_hold(tmp_path, figures):
    path = write_report([_run(tmp_path / "seed_0")], tmp_path / "out" / "report.png")
    assert image.imread(path).shape[2] == 4
    axes = {axis.get_ylabel(): axis for axis in figures[0].axes}

    assert _drawn(axes["share solved"]) == {"pass@8 seed_0": ([39], [0.9])}
    _, smooth = _drawn(axes["mean reward (share correct)"])["seed_0 (mean of 4 steps)"]
    assert smooth[-1] == pytest.approx(0.4 + np.mean([36, 37, 38, 39]) / 100)
    clipped = [line.get_ydata()[-1] for line in axes["clipped share of sequences"].lines]
    assert clipped == pytest.approx([c / 20 for c in range(1, 8)])
    assert [bar.get_width() for bar in axes["stage"].patches] == [20.0, 10.0]  # rollout, other
    assert axes["stage"].get_title() == "Time: 0.5 minutes"


def test_every_axis_has_a_name(tmp_path, figures):
    write_report([_run(tmp_path / "seed_0")], tmp_path / "report.png")
    panels = [axis for axis in figures[0].axes if axis.get_title()]
    assert len(panels) == 6
    assert all(axis.get_xlabel() and axis.get_ylabel() for axis in panels)
    bars = [axis.get_ylabel() for axis in figures[0].axes if not axis.get_title()]
    assert bars == ["$c$: correct rollouts in the group"] * 2


def test_curves_per_c_are_means_over_the_runs(tmp_path, figures):
    runs = [_run(tmp_path / "up", sign=1.0), _run(tmp_path / "down", sign=-1.0)]
    write_report(runs, tmp_path / "report.png")
    axis = next(axis for axis in figures[0].axes if axis.get_ylabel() == "mean of ratio $s - 1$")
    # Opposite signs cancel; what is left is noise of 0.001 over two runs.
    assert max(abs(line.get_ydata()[-1]) for line in axis.lines) < 0.005


def test_curves_per_c_weigh_each_step_by_its_groups():
    rows = [
        {"step": 0, "per_c/groups/c2": 1.0, "x/c2": 1.0},
        {"step": 1},
        {"step": 2, "per_c/groups/c2": 3.0, "x/c2": 5.0},
        {"step": 3, "per_c/groups/c2": 1.0, "x/c2": 1.0},
    ]
    steps, values = report._mean_per_c([report.Run("a", rows, [])], "x/c", 2, window=3)
    # Windows hold steps {0}, {0, 2} and {2, 3}: 1, (1 + 15) / 4 and (15 + 1) / 4.
    assert (steps.tolist(), values.tolist()) == ([0, 2, 3], [1.0, 4.0, 4.0])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_correlation_is_with_the_advantage(tmp_path, sign):
    run = report._read_run(_run(tmp_path / "run", sign=sign))
    steps, values, window = report._windowed_correlation(run)
    assert (steps[0], steps[-1], window) == (3, 39, 4)
    # Advantage 1 - c/8 falls with c as the deviation does; the noise takes less than 1 % of it.
    assert np.all(sign * values > 0.99)


def test_smoothing_is_a_mean_of_the_past_that_skips_gaps():
    values = report._smooth(np.array([math.nan, 1.0, 3.0, math.nan, math.nan, 5.0]), 2)
    assert values.tolist()[1:4] == [1.0, 2.0, 3.0]
    assert math.isnan(values[0])
    assert math.isnan(values[4])


def test_panels_without_data_say_so(tmp_path, figures):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    write_report([tmp_path / "run"], tmp_path / "report.png")
    empty = [axis for axis in figures[0].axes if any(t.get_text() == "no data" for t in axis.texts)]
    assert len(empty) == 5


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"gone: metrics\.jsonl is missing"):
        write_report([tmp_path / "gone"], tmp_path / "report.png")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"reward/mean": 1}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a JSON object with a step"):
        write_report([tmp_path], tmp_path / "report.png")
