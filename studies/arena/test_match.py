"""Factors of widths: which training they are found on, and what is measured of it."""

from __future__ import annotations

import pytest
import torch

from gapo_megatron.objective import METHODS
from gapo_megatron.objective.diagnostics import SUMS
from studies.arena import match
from studies.arena.arms import OVER_LENGTH, PILOT, RATE, TRANSFORMER_RATE, scaled
from studies.arena.train import QUARTERS, Setting, Trained


@pytest.mark.parametrize(
    ("name", "policy", "rate", "over_length"),
    [
        ("gapo_proportional", "walks", RATE, False),
        (OVER_LENGTH, "walks", RATE, True),
        ("gapo_proportional, transformer", "transformer", TRANSFORMER_RATE, False),
    ],
)
def test_mass_lost_is_of_the_second_half_of_the_names_training(
    monkeypatch: pytest.MonkeyPatch, name: str, policy: str, rate: float, over_length: bool
) -> None:
    given: list[tuple[Setting, range]] = []

    def train(setting: Setting, seeds: range, *, evaluate_every: int) -> Trained:
        given.append((setting, seeds))
        per_c = torch.zeros(QUARTERS, len(SUMS), 2, 9, dtype=torch.float64)
        per_c[:, SUMS.index("gradient_mass"), 1, 3] = 1
        per_c[:, SUMS.index("gradient_mass_lost"), 1, 3] = torch.tensor([0.9, 0.8, 0.1, 0.3])
        return Trained(per_c, per_c, per_c, per_c)

    monkeypatch.setattr(match, "train", train)
    assert match.mass_lost(name, 2.0) == pytest.approx(0.2)
    [(setting, seeds)] = given
    assert setting.method == scaled(METHODS["gapo_proportional"], 2.0)
    assert (setting.policy, setting.learning_rate, setting.over_length) == (
        policy,
        rate,
        over_length,
    )
    assert set(seeds) <= set(PILOT)
