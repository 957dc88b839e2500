"""Widths beside rules: known outcomes, and the choice of a width drawn again by a plain loop."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy import stats

from studies.arena import widths
from studies.arena.sweep import FACTORS, Cell
from studies.arena.train import Trained

SEEDS = 32


def outcomes_of(by_factor, spread=0.0, seed=0):
    """Factor -> [2, SEEDS] around (pass@1, pass@64)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        factor: torch.tensor(level).double()[:, None]
        + spread * torch.randn(2, SEEDS, generator=generator, dtype=torch.float64)
        for factor, level in by_factor.items()
    }


def test_a_choice_is_drawn_again_over_seeds():
    found = outcomes_of({1.0: (50.0, 90.0), 4.0: (50.3, 89.7), 8.0: (40.0, 90.0)}, spread=0.5)
    choice = widths.choose_again(found)
    assert choice == widths.choose_again(found)  # no chance in it
    generator, chosen = np.random.default_rng(5), []
    for _ in range(2000):
        drawn = generator.integers(0, SEEDS, SEEDS)
        chosen.append(max(found, key=lambda factor: float(found[factor][:, drawn].sum())))
    share = chosen.count(4.0) / len(chosen)
    assert choice.shares[4.0] == pytest.approx(share, abs=0.05)
    assert 8.0 not in choice.shares
    levels = [found[factor].mean(dim=1).tolist() for factor in chosen]
    assert choice.deviations == pytest.approx(np.std(levels, axis=0).tolist(), rel=0.1)


@pytest.mark.parametrize(("gain", "expected"), [(2.0, True), (0.01, False)])
def test_a_wide_best_width_is_resolved_against_all_below(gain, expected):
    found = outcomes_of({1.0: (45.0, 90.0), 2.0: (50.0, 90.0), 4.0: (50.0 + gain, 90.0)}, 0.5)
    assert widths.is_resolved(found) is expected


def test_ranges_and_variances_of_widths_and_of_rules():
    """Two rules 3 points apart in pass@64, widths 1 point apart in pass@1; nothing else."""
    swept = {
        Cell(rule, "fresh", 0.05, 8): outcomes_of(
            {factor: (50.0 + place / 4, high) for place, factor in enumerate(FACTORS)}
        )
        for rule, high in (("gapo", 90.0), ("gspo_asym", 93.0))
    }
    row = widths.width_or_rule(swept).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "fresh, rate 0.05, k 8",
        "2",
        *["1.00", "0.00", "0.00", "3.00"],
        *["0", "100", "100", "0"],
    ]
    equal = widths.equal_factors(swept | {Cell("gapo", "fresh", 0.1, 8): {}})
    assert "5 cells, mean +0.000 of pass@1 and -3.000 of pass@64" in equal


def test_the_choice_of_widths_widens_an_interval():
    found = outcomes_of({1.0: (50.0, 90.0), 4.0: (50.2, 90.0)}, spread=1.0)
    swept = {Cell(rule, "fresh", 0.05, 8): found for rule in ("gapo", "gspo_asym")}
    generator = torch.Generator().manual_seed(1)
    nothing = torch.zeros(0)
    results = {
        rule: [Trained(torch.rand(3, 3, 64, generator=generator).double(), *[nothing] * 3)]
        for rule in ("gapo", "gspo_asym")
    }
    arms = dict.fromkeys(results)
    row = widths.fixed_clip({"fresh, rate 0.05, k 8": (arms, results)}, swept).splitlines()[-1]
    first, wider, *_ = (float(one) for one in re.findall(r"± ([\d.]+)", row))
    differences = 100 * (results["gapo"][0].curve - results["gspo_asym"][0].curve)[:, 0].mean(dim=0)
    error = stats.sem(differences.numpy())
    quantile = stats.t.ppf(0.975, 63)
    own = widths.choose_again(found).deviations[0]
    assert first == pytest.approx(quantile * error, abs=6e-3)
    assert wider == pytest.approx(quantile * np.sqrt(error**2 + 2 * own**2), abs=6e-3)
