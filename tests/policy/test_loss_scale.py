"""The factor of the loss in fp16: when it halves and when it doubles."""

from __future__ import annotations

import pytest

from gapo_megatron.policy import loss_scale
from gapo_megatron.policy.loss_scale import LossScale


def test_it_halves_at_an_overflow_and_doubles_after_many_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_scale, "_GROWS_AFTER", 3)
    scale, seen = LossScale(value=8.0), []
    for overflows in (0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0):
        for _ in range(overflows):
            scale.overflowed()
        scale.updated()
        seen.append(scale.value)
    # An update that overflowed counts as the first at its new scale.
    assert seen == [8, 8, 4, 4, 8, 8, 8, 16, 16, 4, 4]
    assert scale.num_overflows == 3


def test_it_stays_a_power_of_two_between_one_and_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_scale, "_GROWS_AFTER", 1)
    scale = LossScale()
    for _ in range(100):
        scale.updated()
    assert scale.value == 2.0**32
    while scale.may_halve:
        scale.overflowed()
    assert scale.value == 1.0 and scale.num_overflows == 32
    scale.updated()
    assert scale.value == 2.0
