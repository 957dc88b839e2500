"""Question 13: each rule beside the same method without it, at registered widths."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gapo_megatron.objective import METHODS
from studies.arena import nearest
from studies.arena.arms import NEAREST, scaled
from studies.arena.jobs import Job, Store


@pytest.mark.parametrize("name", NEAREST)
def test_a_parent_is_the_clipped_surrogate_of_the_same_widths_and_advantages(name: str) -> None:
    rule, parent = METHODS[name], nearest.parent(METHODS[name])
    assert (parent.family, parent.virtual_correct) == ("clipped", 0)
    for same in ("ratio", "aggregation", "normalize_std"):
        assert getattr(parent, same) == getattr(rule, same)
    if name != "atr":
        assert (parent.eps_low, parent.eps_high_max) == (rule.eps_low, rule.eps_high_max)


@pytest.mark.parametrize("name", NEAREST)
def test_every_width_of_a_rule_is_scaled(name: str) -> None:
    """ATR's are of a square of the ratio's distance: its range scales as the others do."""
    rule = METHODS[name]
    small = scaled(rule, 0.1)
    power = 2 if name == "atr" else 1
    assert small.eps_low == pytest.approx(rule.eps_low * 0.1**power)
    assert small.eps_high_max == pytest.approx(rule.eps_high_max * 0.1**power)
    for key in ("eps_low_correct", "eps_high_wrong", "rescue_noise"):
        value = getattr(rule, key)
        assert getattr(small, key) == (None if value is None else pytest.approx(0.1 * value))
    if name == "atr":  # r - 1 - ln r is (r - 1)^2 / 2 near 1
        assert math.sqrt(2 * small.eps_low) == pytest.approx(0.02)


def test_arms_come_in_pairs_on_seeds_of_their_own(tmp_path: Path) -> None:
    settings, pairs = nearest.arms(), nearest.pairs()
    assert {name for pair in pairs for name in pair} == {*settings} and len(pairs) == 10
    jobs = [Job(setting, chunk) for setting in settings.values() for chunk in nearest.CHUNKS]
    assert len({job.name for job in jobs}) == len(jobs)
    assert min(job.seeds.start for job in jobs) == 6400
    text = nearest.table(Store(tmp_path, archive=tmp_path / "none.npz"))
    assert text.count("missing") == 7 * len(pairs)


def test_the_page_has_the_table_of_the_archive(tmp_path: Path) -> None:
    text = nearest.table(Store(tmp_path, archive=nearest.ARCHIVE))
    assert "missing" not in text
    assert text in Path(nearest.__file__).with_name("README.md").read_text("utf-8")
