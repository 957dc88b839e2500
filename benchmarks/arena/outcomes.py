"""What is compared: exact pass rates at the end of training, seed by seed, in percentage points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.arena.train import PASS_AT, Trained

LATE = 3
"""Evaluations at the end of training whose mean is a seed's outcome."""
EQUAL = "pass@64 at equal pass@1"
OUTCOMES = ("pass@1", "pass@64", EQUAL)
MARGINS = {"pass@1": 0.2, "pass@64": 0.5, EQUAL: 0.5}
"""Differences below these, in points, do not matter to a practitioner."""


def late(trained: Sequence[Trained]) -> Tensor:
    """[len(PASS_AT), seeds] float64, in %."""
    return torch.cat([100 * one.curve[-LATE:].mean(dim=0) for one in trained], dim=1)


def differences(first: Sequence[Trained], second: Sequence[Trained]) -> dict[str, Tensor]:
    """`first` minus `second`, [seeds] float64 in points, by outcome; chunks of the same seeds."""
    by_pass = late(first) - late(second)
    rows = {f"pass@{k}": by_pass[place] for place, k in enumerate(PASS_AT)}
    one, other = (torch.cat([100 * t.curve for t in arm], dim=2) for arm in (first, second))
    rows[EQUAL] = _at_equal_pass_1(one, other)
    return {name: rows[name] for name in OUTCOMES}


def _at_equal_pass_1(first: Tensor, second: Tensor) -> Tensor:
    """Difference of pass@64 where both first reach the pass@1 that both reach, [seeds].

    Curves are [evaluations, len(PASS_AT), seeds]. Two arms may learn at different speeds: this asks
    what each paid for the same pass@1.
    """
    low, high = PASS_AT.index(1), PASS_AT.index(64)
    level = torch.minimum(first[:, low].amax(dim=0), second[:, low].amax(dim=0))
    return _at(first[:, low], first[:, high], level) - _at(second[:, low], second[:, high], level)


def _at(rising: Tensor, wanted: Tensor, level: Tensor) -> Tensor:
    """`wanted` where `rising` [evaluations, seeds] first reaches `level` [seeds], interpolated."""
    reached = (rising >= level).double().argmax(dim=0, keepdim=True)
    before = (reached - 1).clamp(min=0)
    low, high = rising.gather(0, before)[0], rising.gather(0, reached)[0]
    share = torch.where(high > low, (level - low) / (high - low).clamp(min=1e-12), 1)
    left, right = wanted.gather(0, before)[0], wanted.gather(0, reached)[0]
    return left + share * (right - left)
