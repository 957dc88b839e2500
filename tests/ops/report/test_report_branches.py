"""Branches among the runs of a report: which run each left, and what they are called."""

from __future__ import annotations

import json

import pytest

from gapo_megatron.errors import DataError
from gapo_megatron.ops.report.archive import read_archive, write_archive
from gapo_megatron.ops.report.clipping import by_c, correlation, deviation_per_c
from gapo_megatron.ops.report.costs import step_time
from gapo_megatron.ops.report.learning import spectrum
from gapo_megatron.ops.report.picture import draw_picture
from gapo_megatron.ops.report.report import note_changes, write_report
from gapo_megatron.ops.report.runs import read_run
from gapo_megatron.ops.report.style import style
from tests.messages import mentions
from tests.report_setup import compare, write_run


def write_branch(folder, parent, *, step, method="gapo"):
    """As training does: of a run of gspo_asym."""
    changes = {"objective.method": ["gspo_asym", "gapo"]} if method == "gapo" else {}
    changes |= {"run.num_steps": [step, 40]}
    branch = {"run": str(parent), "step": step, "changes": changes}
    (folder / "branch.json").write_text(json.dumps(branch))


def test_a_branch_stands_beside_the_runs_it_left_and_not_in_curves(tmp_path):
    folders = []
    for seed in (0, 1):
        folders.append(write_run(tmp_path / f"gspo_asym_{seed}", method="gspo_asym", seed=seed))
        folder = write_run(tmp_path / f"a_branch_{seed}", seed=seed)
        write_branch(folder, tmp_path / f"gspo_asym_{seed}", step=6)
        folders.insert(0, folder)
    comparison = compare(*folders)
    branch, parent = comparison.arms
    assert (branch.label, parent.label) == ("gspo_asym to 6, gapo", "gspo_asym")
    assert comparison.curves == [parent]
    assert comparison.first is parent  # whichever run was named first
    assert (comparison.parent(branch), comparison.parent(parent)) == (parent, None)
    without = compare(*(folder for folder in folders if folder.name != "gspo_asym_1"))
    assert without.parent(without.arms[0]) is None
    assert len(without.curves) == 2


def _two_studies(tmp_path):
    """Folders of two studies whose runs have the same names, and of a branch of the first."""
    first, second = (
        write_run(tmp_path / study / "seed_0", *more, method="gspo_asym")
        for study, more in (("a", ()), ("b", ("optimizer.learning_rate=1e-3",)))
    )
    branch = write_run(tmp_path / "a_branch" / "seed_0")
    write_branch(branch, first, step=6)
    return first, second, branch


def test_a_branch_left_the_run_of_the_recorded_folder(tmp_path):
    for left in _two_studies(tmp_path)[:2]:
        write_branch(tmp_path / "a_branch" / "seed_0", left, step=6)
        comparison = compare(*(tmp_path / study / "seed_0" for study in ("a", "a_branch", "b")))
        (branch,) = (arm for arm in comparison.arms if arm.runs[0].branch is not None)
        assert comparison.parent(branch).runs[0].folder == left


def test_a_branch_left_the_run_of_that_name_where_one_alone_has_it(tmp_path):
    """Studies move. A branch of the same run is not the one that it left."""
    first, _, branch = _two_studies(tmp_path)
    other = write_run(tmp_path / "c_branch" / "seed_0", "objective.eps_high_max=0.03")
    for folder in (branch, other):
        write_branch(folder, "/gone/seed_0", step=6)
    comparison = compare(branch, other, first)
    parents = [comparison.parent(arm) for arm in comparison.arms]
    assert [one and one.runs[0].folder for one in parents] == [first, first, None]


def test_a_run_that_a_branch_may_have_left_is_not_guessed(tmp_path):
    first, second, branch = _two_studies(tmp_path)
    write_branch(branch, "/gone/seed_0", step=6)
    with pytest.raises(DataError, match=mentions(branch, "/gone/seed_0", first, second)):
        compare(first, second, branch)


def test_branches_are_arms_of_their_own(tmp_path):
    folders = [write_run(tmp_path / "whole")]
    for seed in (0, 1):
        for method in ("gapo", "gspo_asym"):
            folder = write_run(tmp_path / f"{method}_{seed}", method=method, seed=seed)
            write_branch(folder, f"/runs/{seed}", step=6, method=method)
            folders.append(folder)
    comparison = compare(*folders)
    assert [arm.label for arm in comparison.arms] == [
        "gapo",
        "gspo_asym to 6, gapo",
        "gspo_asym to 6, gspo_asym",
    ]
    assert [len(arm.runs) for arm in comparison.curves] == [1, 2, 2]


def _marks(figure):
    """Where each panel has lines at a change of settings."""
    return [
        [line.get_xdata()[0] for line in axis.lines if line.get_color() == "0.3"]
        for axis in figure.axes
    ]


def test_a_run_that_changed_its_method_is_an_arm_of_its_own_with_a_line_in_its_curves(tmp_path):
    whole = write_run(tmp_path / "whole", method="gspo")
    changed = write_run(tmp_path / "changed", method="gspo", seed=1)
    changes = {"objective.method": ["gapo", "gspo"], "optimizer.learning_rate": [1e-6, 1e-5]}
    (changed / "changes.json").write_text(json.dumps([{"step": 3, "changes": changes}]))
    comparison = compare(whole, changed)
    first, second = (arm.label for arm in comparison.arms)
    assert first == "gspo" and second.startswith("gapo learning_rate=1e-06 to 3, gspo")
    assert {arm: [*steps] for arm, steps in comparison.changes.items()} == {second: [3]}
    with style():
        figure = draw_picture(comparison)
    # Time is not over steps, and the panels per c are those of the first arm.
    assert _marks(figure) == [[2.5], [2.5], [], [], [], [2.5]]
    report = write_report([whole, changed], tmp_path / "report")
    page = report.page.read_text(encoding="utf-8")
    assert page.count("learning_rate=1e-05 (was 1e-06)") >= 3
    marks = {
        **{correlation: [[2.5]], by_c: [[], [], []], step_time: [[]]},
        **{deviation_per_c: [[], [2.5]], spectrum: [[], [2.5]]},
    }
    for make, expected in marks.items():
        with style():
            exhibit = note_changes(make(comparison), comparison)
        assert _marks(exhibit.figure) == expected, make
        # A note tells of a line where there is one, and in either case of the arm.
        assert ("ashed line" in exhibit.notes[-1]) == ([2.5] in expected), make
        assert second in exhibit.notes[-1]
    (tmp_path / "archive").mkdir()
    write_archive([read_run(changed)], tmp_path / "archive")
    (archived,) = read_archive(tmp_path / "archive")
    assert archived.changes == [{"step": 3, "changes": changes}]
