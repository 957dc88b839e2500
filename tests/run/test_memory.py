"""Memory of a step is that of the worst rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.run.memory import (
    MOMENTS,
    DeviceMemory,
    StepMemory,
    device_reader,
)
from tests.dist import run_distributed, single_rank

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
