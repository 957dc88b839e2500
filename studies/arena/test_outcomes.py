"""What the arena compares, how many seeds that takes, and how its trainings go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gapo_megatron.objective import METHODS
from studies.arena import jobs as arena_jobs
from studies.arena.arms import scaled
from studies.arena.jobs import SELECTION, Job, Store
from studies.arena.train import LATE, Setting, Trained
from studies.arena.verdicts import (
    EQUAL,
    OUTCOMES,
    differences,
    late,
    pass_at_equal_divergence,
)


def _trained(*seeds: list[tuple[float, float]]) -> Trained:
    """Curves of (pass@1, pass@64) in %, one list a seed; the KL divergence is pass@64 / 100."""
    curve = torch.tensor([[(low, high, high) for low, high in seed] for seed in seeds])
    nothing = torch.zeros(0)
    return Trained(curve.double().permute(1, 2, 0) / 100, nothing, nothing, nothing)


def test_late_is_the_mean_of_the_last_three_evaluations() -> None:
    chunks = [_trained([(90, 90), (1, 10), (2, 20), (6, 60)]), _trained([(0, 0)] * 3 + [(3, 9)])]
    assert late(chunks)[0].tolist() == pytest.approx([3, 1])
    assert late(chunks)[1].tolist() == pytest.approx([30, 3])
    assert len(late(chunks)) == 2  # without the KL divergence


def test_differences_are_paired_over_chunks() -> None:
    first = [_trained([(5, 50)] * 4), _trained([(7, 40)] * 4)]
    second = [_trained([(5, 45)] * 4), _trained([(4, 42)] * 4)]
    found = differences(first, second)
    assert tuple(found) == OUTCOMES
    assert found["pass@1"].tolist() == pytest.approx([0, 3])
    assert found["pass@64"].tolist() == pytest.approx([5, -2])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # The level is 20, the top of the second: the first is half way from 10 to 30 there.
        ([(0, 0), (10, 40), (30, 60)], [(0, 0), (10, 41), (20, 44)], 50 - 44),
        # The first time it is reached, though pass@64 falls and pass@1 comes back.
        ([(0, 0), (20, 50), (10, 40), (20, 30)], [(0, 0), (5, 9), (10, 9), (40, 29)], 50 - 47 / 3),
        # An arm that never leaves the start is compared at the start.
        ([(10, 40), (9, 50), (8, 60)], [(10, 40), (20, 70), (30, 80)], 0),
        # Flat, then rising: nothing is divided by 0.
        ([(10, 40), (10, 45), (20, 60)], [(10, 40), (20, 50), (20, 90)], 60 - 50),
    ],
)
def test_at_equal_pass_1(
    first: list[tuple[float, float]], second: list[tuple[float, float]], expected: float
) -> None:
    there = differences([_trained(first)], [_trained(second)])[EQUAL]
    back = differences([_trained(second)], [_trained(first)])[EQUAL]
    assert there.tolist() == pytest.approx([expected])
    assert back.tolist() == pytest.approx([-expected])


def test_pass_1_at_equal_divergence() -> None:
    """The level is 44 %, where the first is at 18 between 10 (at 40) and 30 (at 50)."""
    first, second = [(0, 0), (10, 40), (30, 50)], [(0, 0), (10, 41), (20, 44)]
    found = pass_at_equal_divergence([_trained(first)], [_trained(second)])
    assert found.tolist() == pytest.approx([18 - 20])


def test_scaled_leaves_no_lower_bound_alone() -> None:
    both = scaled(METHODS["gspo_asym"], 2.0)
    assert (both.eps_low, both.eps_high_max) == (6e-3, 1e-2)
    assert both.off_policy_mask is None
    upper = scaled(METHODS["cispo"], 0.5)
    assert (upper.eps_low, upper.eps_high_max) == (1.0, 0.14)
    assert scaled(replace(METHODS["dapo"], off_policy_mask=0.5), 3.0).off_policy_mask == 1.5
    assert 0.99 < scaled(METHODS["dapo"], 50.0).eps_low < 1  # 1 - eps_low is still a ratio


def _results(value: float) -> dict[str, np.ndarray]:
    """A result's file: a curve of 64 seeds, and nothing by c."""
    shapes = {
        "curve": (5, 3, 64),
        "per_c": (4, 9, 2, 9),
        "moved": (4, 5, 2, 9),
        "progress": (3, 64),
    }
    found = {name: np.full(shape, value) for name, shape in shapes.items()}
    return found | {"seconds": np.array(1.0)}


def test_run_trains_what_is_missing(tmp_path: Path) -> None:
    setting = Setting(method=METHODS["gapo"], learning_rate=0.05, num_steps=2)
    finished, broken = Job(setting, 0), Job(setting, 1)
    assert finished.name != broken.name
    np.savez(tmp_path / f"{finished.name}.npz", **_results(0.5))
    part = tmp_path / f"{broken.name}.part"
    part.write_bytes(b"half")

    store = Store(tmp_path, archive=tmp_path / "none.npz")
    store.run([finished, broken, finished], num_processes=1)

    first, second = store.read(setting, range(2))
    assert bool((first.curve == 0.5).all())
    assert second.curve.shape == (1, 3, 64) and second.per_c.any()
    assert not part.exists()


def test_seeds_that_choose_widths_are_evaluated_at_the_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_jobs, "EVALUATE_EVERY", 1)
    monkeypatch.setattr(arena_jobs, "SELECTION_SEEDS", range(2))
    monkeypatch.setattr(arena_jobs, "SEEDS_PER_CHUNK", 2)
    setting = Setting(method=METHODS["gapo"], learning_rate=0.05, num_steps=4)
    jobs = [Job(setting, 0), Job(setting, SELECTION)]
    store = Store(tmp_path, archive=tmp_path / "none.npz")
    for job in jobs:
        arena_jobs._train(job, tmp_path / f"{job.name}.npz")
    (whole,), (chosen,) = (store.read(setting, [job.chunk]) for job in jobs)
    assert whole.curve.shape[0] == 5
    assert torch.equal(chosen.curve, whole.curve[-LATE:])
    assert torch.equal(chosen.per_c, whole.per_c)


def test_the_archive_has_what_the_folder_lacks(tmp_path: Path) -> None:
    setting = Setting(method=METHODS["gapo"], learning_rate=0.05)
    jobs = [Job(setting, chunk) for chunk in (0, 1, SELECTION)]
    full, archive = tmp_path / "full", tmp_path / "results.npz"
    full.mkdir()
    for job, value in zip(jobs, (0.12344, 0.25, 0.5), strict=True):
        np.savez(full / f"{job.name}.npz", **_results(value))
    Store(full, archive=archive).pack([*jobs, jobs[0]], archive)

    empty = Store(tmp_path / "empty", archive=archive)
    first, second = empty.read(setting, range(2))
    assert first.curve.numpy() == pytest.approx(0.12344, rel=2**-12)  # rounded
    assert not (first.curve == np.float32(0.12344)).any()
    assert bool((second.per_c == 0.25).all()) and second.curve.dtype == torch.float64
    (chosen,) = empty.read(setting, [SELECTION])
    assert bool((chosen.curve == 0.5).all()) and not len(chosen.moved)  # no choice needs it
    assert empty.seconds(jobs) == 3.0
    other = Job(setting, 2)
    assert other not in empty and jobs[0] in empty
    with pytest.raises(FileNotFoundError, match=other.name):
        empty.read(setting, [2])


def test_a_result_is_named_by_its_setting() -> None:
    setting = Setting(method=METHODS["gapo"], learning_rate=0.05)
    others = [
        replace(setting, learning_rate=0.1),
        replace(setting, staleness=4),
        replace(setting, reversed_width=True),
        replace(setting, method=scaled(METHODS["gapo"], 1.5)),
    ]
    assert len({Job(one, 0).name for one in (setting, *others)}) == 5
    assert set(Job(setting, SELECTION).seeds).isdisjoint(Job(setting, 9999).seeds)
