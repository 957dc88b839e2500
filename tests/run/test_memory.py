"""Memory of a step is that of the worst rank; growth is told from variation."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.run.memory import (
    MOMENTS,
    WINDOW,
    DeviceMemory,
    Growth,
    StepMemory,
    device_reader,
)
from tests.dist import run_distributed, single_rank
from tests.messages import mentions

GIB = 2**30
CPU = torch.device("cpu")


def run_step(memory: StepMemory, moments: Sequence[str] = MOMENTS) -> dict[str, float]:
    for moment in moments:
        memory.note(moment)
    return memory.lap(dist.group.WORLD)


def test_without_a_device_there_is_the_hosts_alone() -> None:
    with single_rank():
        found = run_step(StepMemory(CPU))
    assert found.keys() == {"memory/host_rss_gib", "memory/host_rss_rank"}
    assert 0.05 < found["memory/host_rss_gib"] < 100  # torch alone is 0.2


def two_ranks() -> tuple[dict[str, float], dict[str, float]]:
    """Rank 1 has less free after sleep, rank 0 at the peak; a second step has no peak."""
    rank, peaks = dist.get_rank(), []

    def read(peak: bool) -> DeviceMemory:
        peaks.append(peak)
        at_peak = 8 * peak * (2 - rank)
        used = (10 + rank + at_peak) * GIB
        return DeviceMemory(used, used + GIB, 80 * GIB - used)

    memory = StepMemory(CPU, read=read)
    found = run_step(memory)
    assert peaks == [False, True, False]
    return found, run_step(memory, MOMENTS[1:])


def test_every_figure_is_the_worst_ranks() -> None:
    (found, resumed), others = run_distributed(two_ranks, 2)
    assert others == (found, resumed)
    assert found["memory/after_sleep/allocated_gib"] == 11
    assert found["memory/after_sleep/reserved_gib"] == 12
    assert found["memory/after_sleep/free_gib"] == 69 and found["memory/after_sleep/rank"] == 1
    assert found["memory/update_peak/free_gib"] == 54 and found["memory/update_peak/rank"] == 0
    assert len(found) == 2 + 4 * 3
    # A step that began in another process has no peak.
    assert {name.split("/")[1] for name in resumed} == {
        "after_wake", "host_rss_gib", "host_rss_rank"
    }  # fmt: skip


def test_every_figure_is_documented() -> None:
    with single_rank():
        found = run_step(StepMemory(CPU, read=lambda _: DeviceMemory(1, 2, 3)))
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    documented = set()
    for name in re.findall(r"`(memory/[^`]+)`", text):
        documented |= {name.replace("{moment}", moment) for moment in MOMENTS}
    assert documented == found.keys()
    assert all(f"`{moment}`" in text for moment in MOMENTS)


def test_a_peak_is_what_the_device_lacked_then(monkeypatch: pytest.MonkeyPatch) -> None:
    resets = []
    figures = {"memory_allocated": 3, "memory_reserved": 5, "max_memory_allocated": 7}
    figures["max_memory_reserved"] = 9
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20, 100))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    read = device_reader(torch.device("cuda", 0))
    assert read(False) == DeviceMemory(allocated=3, reserved=5, free=20)
    # Four bytes more were reserved then.
    assert read(True) == DeviceMemory(allocated=7, reserved=9, free=16)
    assert len(resets) == 2
    assert device_reader(CPU)(False) is None


def growths(values: Sequence[float], least: float = 0.1) -> list[tuple[float, float]]:
    growth = Growth(least)
    return [found for value in values if (found := growth.add(value))]


def test_a_growth_is_told_from_noise_and_from_a_jump() -> None:
    rng = random.Random(0)
    creeping = [0.05 * step for step in range(2 * WINDOW)]
    assert growths(creeping) == [(0.1, pytest.approx(0.85)), (1.1, pytest.approx(1.85))]
    assert len(growths([value + rng.uniform(0, 0.1) for value in creeping])) == 2
    assert growths([-value for value in creeping]) == []
    assert growths([rng.gauss(0, 10) for _ in range(2000)]) == []
    for at in range(WINDOW):
        assert growths([float(step >= at) for step in range(WINDOW)]) == []
    assert growths([value / 100 for value in creeping]) == []  # too little to matter
    assert growths([40, 4, 8, 9, 12, 25, 25]) == []  # five that rise, but not above all before
    assert growths([1, 1, 4, 8, 9, 12, 25, 25]) == [(4, 25)]  # at once: five more may be too many
    assert growths([1, 2, 3, 3.5, 4.5]) == []  # too little not to wait
    outliers = [100.0 if step % 10 == 4 else value for step, value in enumerate(creeping)]
    assert len(growths(outliers)) == 1


def test_a_device_that_fills_up_is_warned_of_once_a_growth(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warned(lost_gib: Sequence[float]) -> list[str]:
        left = iter(lost_gib)
        memory = StepMemory(
            CPU, read=lambda _: DeviceMemory(GIB, GIB, int((60 - next(left)) * GIB))
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gapo_megatron.run.memory"):
            for _ in lost_gib:
                run_step(memory, ["after_sleep"])
        return caplog.messages

    with single_rank():
        (message,) = warned([0.5 * step for step in range(WINDOW + 10)])
        expected = mentions("after_sleep/free_gib", "59.00", "51.50", WINDOW, "debugging.md")
        assert re.search(expected, message)
        assert warned([0.0] * 10 + [5.0] * 30) == []
        assert len(warned([0.5 * step for step in range(2 * WINDOW)])) == 2
