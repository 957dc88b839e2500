"""What the arena compares, how many seeds that takes, and how its trainings go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.arena.arms import scaled
from benchmarks.arena.jobs import Job, read, run
from benchmarks.arena.train import Setting, Trained
from benchmarks.arena.verdicts import EQUAL, OUTCOMES, differences, late
from gapo_megatron.objective import METHODS


def _trained(*seeds: list[tuple[float, float]]) -> Trained:
    """Curves of (pass@1, pass@64) in %, one list a seed; pass@8 is 0."""
    curve = torch.tensor([[(low, 0.0, high) for low, high in seed] for seed in seeds])
    return Trained(curve.double().permute(1, 2, 0) / 100, torch.zeros(0))


def test_late_is_the_mean_of_the_last_three_evaluations() -> None:
    chunks = [_trained([(90, 90), (1, 10), (2, 20), (6, 60)]), _trained([(0, 0)] * 3 + [(3, 9)])]
    assert late(chunks)[0].tolist() == pytest.approx([3, 1])
    assert late(chunks)[2].tolist() == pytest.approx([30, 3])


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


def test_scaled_leaves_no_lower_bound_alone() -> None:
    both = scaled(METHODS["gspo_asym"], 2.0)
    assert (both.eps_low, both.eps_high_max) == (6e-3, 1e-2)
    assert both.off_policy_mask is None
    upper = scaled(METHODS["cispo"], 0.5)
    assert (upper.eps_low, upper.eps_high_max) == (1.0, 0.14)
    assert scaled(replace(METHODS["dapo"], off_policy_mask=0.5), 3.0).off_policy_mask == 1.5


def test_run_trains_what_is_missing(tmp_path: Path) -> None:
    setting = Setting(method=METHODS["gapo"], learning_rate=0.05, num_steps=2)
    finished, broken = Job(setting, 0), Job(setting, 1)
    assert finished.path(tmp_path) != broken.path(tmp_path)
    kept = np.full((1, 3, 64), 0.5)
    np.savez(finished.path(tmp_path), curve=kept, per_c=np.zeros(1), seconds=1.0)
    part = broken.path(tmp_path).with_suffix(".part")
    part.write_bytes(b"half")

    run([finished, broken, finished], tmp_path, num_processes=1)

    first, second = read(setting, 2, tmp_path)
    assert torch.equal(first.curve, torch.from_numpy(kept))
    assert second.curve.shape == (1, 3, 64) and second.per_c.any()
    assert not part.exists()


def test_a_result_is_named_by_its_setting(tmp_path: Path) -> None:
    setting = Setting(method=METHODS["gapo"], learning_rate=0.05)
    others = [
        replace(setting, learning_rate=0.1),
        replace(setting, staleness=4),
        replace(setting, reversed_width=True),
        replace(setting, method=scaled(METHODS["gapo"], 1.5)),
    ]
    paths = {Job(one, 0).path(tmp_path) for one in (setting, *others)}
    assert len(paths) == 5
