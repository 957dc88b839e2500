"""What single steps do, from numbers that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gapo_megatron.objective.diagnostics import SUMS
from studies.arena import steps
from studies.arena.train import MOVED, PROGRESS, QUARTERS, Trained

K = 4
NOTHING = torch.zeros(0)


def _moved(responses: list[tuple[int, int, float]], *, quarter: int = 0) -> Trained:
    """Sums of (correct, c, log-ratio) of single responses."""
    sums = torch.zeros(QUARTERS, len(MOVED), 2, K + 1, dtype=torch.float64)
    for correct, c, ratio in responses:
        half = ratio / 2  # as if each had two tokens
        row = torch.tensor([1, ratio, ratio**2, half, half**2], dtype=torch.float64)
        sums[quarter, :, correct, c] += row
    return Trained(NOTHING, NOTHING, sums, NOTHING)


def test_correlation_over_responses_is_that_of_the_list() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(60, generator=generator).tolist()
    responses = [(at % 2, 1 + at % 3, at % 2 + 0.5 * noise[at]) for at in range(60)]
    arm = [_moved(responses[:20]), _moved(responses[20:40]), _moved(responses[40:], quarter=3)]
    advantage = [correct - c / K for correct, c, _ in responses]
    expected = np.corrcoef(advantage, [ratio for _, _, ratio in responses])[0, 1]
    assert steps.response_correlation(arm) == pytest.approx(expected)
    chosen = [row for row in responses if row[1] == 2]
    expected = np.corrcoef([row[0] for row in chosen], [row[2] for row in chosen])[0, 1]
    assert steps.response_correlation(arm, counts=[2]) == pytest.approx(expected)
    last = steps.response_correlation(arm, slice(3, 4))
    assert last == pytest.approx(steps.response_correlation(arm[2:]))
    assert math.isnan(steps.response_correlation(arm[:1], slice(1, 2)))


def test_the_papers_correlation_is_over_means_by_c() -> None:
    sums = torch.zeros(QUARTERS, len(SUMS), 2, K + 1, dtype=torch.float64)
    for c, (number, deviation) in {1: (2, 3.0), 2: (4, 1.0), 3: (9, 2.0)}.items():
        values = {"sequences": number, "deviation": number * deviation}
        values["advantage"] = number * (1 - c / K)
        for name, value in values.items():
            sums[c, SUMS.index(name), 1, c] = value
            sums[c, SUMS.index(name), 0, c] = 7  # wrong responses: not to be counted
    arm = [Trained(NOTHING, sums, NOTHING, NOTHING)]
    expected = np.corrcoef([3.0, 1.0, 2.0], [0.75, 0.5, 0.25])[0, 1]
    assert steps.paper_correlation(arm) == pytest.approx(expected)
    assert math.isnan(steps.paper_correlation(arm, slice(1, 3)))  # two points


def test_the_optimum_has_nearly_all_of_the_best_gain() -> None:
    """exp(A / lambda) / Z of two responses, exactly; a step the other way has minus it."""
    probability = torch.tensor([0.3, 0.7], dtype=torch.float64)
    for scale, share in ((1e-3, 100), (-1e-3, -100)):
        new = (probability * torch.tensor([scale, 0.0]).exp()).double()
        new = new / new.sum()
        values = {
            "gain": new[0] - probability[0],
            "divergence": (new * (new / probability).log()).sum(),
            "variance": probability[0] * probability[1],
        }
        progress = torch.stack([values[name] for name in PROGRESS])[:, None].expand(-1, 3)
        arm = [Trained(NOTHING, NOTHING, NOTHING, progress)]
        assert steps.share_of_best_gain(arm).tolist() == pytest.approx([share] * 3, rel=1e-3)
