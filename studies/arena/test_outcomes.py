"""What the arena compares, how many seeds that takes, and how its trainings go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gapo_megatron.objective import METHODS
from studies.arena.jobs import SELECTION, Job, Store
from studies.arena.train import Setting, Trained
from studies.arena.verdicts import (
    EQUAL,
    differences,
)


def _trained(*seeds: list[tuple[float, float]]) -> Trained:
    """Curves of (pass@1, pass@64) in %, one list a seed; the KL divergence is pass@64 / 100."""
    curve = torch.tensor([[(low, high, high) for low, high in seed] for seed in seeds])
    nothing = torch.zeros(0)
    return Trained(curve.double().permute(1, 2, 0) / 100, nothing, nothing, nothing)


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
