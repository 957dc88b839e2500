"""Memory of devices and hosts through a step, and a warning where it creeps.

A step is told its moments; at its end all ranks send their figures in one collective:

    after_sleep   the engine has released its memory, no pass has begun
    update_peak   the most since then: carried log-probs, old pass, updates, rounding
    after_wake    the engine has the new weights and its KV cache

Of a device, `free` is what nobody has, not even torch's allocator: what the driver says. `reserved`
is what that allocator has, `allocated` what tensors have of it. Both count the pools of a vLLM on
this device, whose memory is gone while it sleeps though torch does not know: compare them with
themselves.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from math import inf
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

MOMENTS = ("after_sleep", "update_peak", "after_wake")
WINDOW = 20
"""Steps that a growth is looked for in."""
_END = 5
"""Steps at either end of a window; a growth is measured between the medians of both ends."""
_LEAST_TAU = 0.8
_FEW, _MUCH_GIB = 5, 0.75
"""Steps, and GiB that each takes more than the one before: that does not wait for a window."""
_LEAST_DEVICE_GIB, _LEAST_HOST_GIB = 1 / 32, 1 / 4
"""Growth over a window that is worth a warning."""
_GIB = 2**30


class DeviceMemory(NamedTuple):
    """Bytes of a device; see above."""

    allocated: int
    reserved: int
    free: int


Read = Callable[[bool], DeviceMemory | None]
"""Reads memory: the peak since the last reading if True, else the present. None: no device."""


def device_reader(device: torch.device) -> Read:
    """A function that reads a GPU's memory; every reading begins a new peak."""

    def read(peak: bool) -> DeviceMemory | None:
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        if peak:
            most = torch.cuda.max_memory_reserved(device)
            free, reserved = free + reserved - most, most
            allocated = torch.cuda.max_memory_allocated(device)
        else:
            allocated = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return DeviceMemory(allocated, reserved, free)

    return read


def resident_bytes() -> int:
    """Host memory of this process, page-locked memory included; its workers have their own."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Growth:
    """Tells a figure that grows step after step from one that goes up and down, or jumps once.

    Kendall's tau of the last `WINDOW` values: of their pairs, the share that grow less the share
    that fall. It is 1 where each is above all before, 0.5 where one jump is all there is, and
    within 0.5 of 0 where values only vary. A growth is a tau of 0.8 and more, where the median of
    the last five values is `least` above that of the first five; or five values, each 0.75 GiB and
    more above all before: then a window may be more than is left.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._values: list[float] = []

    def add(self, value: float) -> tuple[float, float] | None:
        """Take the value of one more step.

        Returns:
            The medians at both ends of a growth, or its ends; None where there is none. The next
            growth is looked for in the steps to come.
        """
        self._values = [*self._values, value][-WINDOW:]
        before, few = self._values[:-_FEW], self._values[-_FEW:]
        rises = [b - a for a, b in itertools.pairwise([max(before, default=-inf), *few])]
        if len(few) == _FEW and min(rises) >= _MUCH_GIB:
            self._values = []
            return few[0], few[-1]
        if len(self._values) < WINDOW:
            return None
        pairs = [(b > a) - (b < a) for i, b in enumerate(self._values) for a in self._values[:i]]
        first, last = median(self._values[:_END]), median(self._values[-_END:])
        if sum(pairs) < _LEAST_TAU * len(pairs) or last - first < self._least:
            return None
        self._values = []
        return first, last


class StepMemory:
    """Recorder of a step's memory.

    Args:
        device: this rank's device.
        read: replaces the device's reading, for tests.
    """

    def __init__(self, device: torch.device, *, read: Read | None = None) -> None:
        self._read = read or device_reader(device)
        self._seen: dict[str, DeviceMemory] = {}
        self._used, self._resident = Growth(_LEAST_DEVICE_GIB), Growth(_LEAST_HOST_GIB)

    def note(self, moment: str) -> None:
        """Read the device at one of `MOMENTS`; every rank at the same ones.

        The peak is that since `after_sleep`, and left out where the step had none: a resumed one.
        """
        is_peak = moment == "update_peak"
        if is_peak and "after_sleep" not in self._seen:
            return
        if (found := self._read(is_peak)) is not None:
            self._seen[moment] = found

    def lap(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """End a step.

        Args:
            group: all ranks, for tensors on the CPU; None: the default group, where it is gloo.

        Returns:
            The same on every rank, in GiB: `memory/host_rss_gib`, the most, and
            `memory/host_rss_rank`, whose; for each moment of a device `memory/{moment}/free_gib`,
            the least, `memory/{moment}/rank`, whose, and `.../allocated_gib`, `.../reserved_gib`,
            the most of any rank.

        Collectives: one all-gather of at most ten numbers.
        """
        figures = [float(resident_bytes())]
        for found in self._seen.values():
            figures += map(float, found)
        mine = torch.tensor(figures, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        ranks = torch.stack(gathered) / _GIB
        resident, rank = ranks[:, 0].max(dim=0)
        values = {"memory/host_rss_gib": float(resident), "memory/host_rss_rank": int(rank)}
        for i, moment in enumerate(self._seen):
            allocated, reserved, free = ranks[:, 3 * i + 1 : 3 * i + 4].unbind(dim=1)
            values |= {
                f"memory/{moment}/allocated_gib": float(allocated.max()),
                f"memory/{moment}/reserved_gib": float(reserved.max()),
                f"memory/{moment}/free_gib": float(free.min()),
                f"memory/{moment}/rank": int(free.argmin()),
            }
        self._seen = {}
        self._warn(values, is_first=dist.get_rank(group) == 0)
        return values

    def _warn(self, values: dict[str, float], *, is_first: bool) -> None:
        free = values.get("memory/after_sleep/free_gib")
        if free is not None and (found := self._used.add(-free)) and is_first:
            logger.warning(
                "memory/after_sleep/free_gib fell from %.2f to %.2f GiB within %d steps, on rank "
                "%d last: something keeps device memory from step to step (docs/debugging.md, "
                "Memory that creeps)",
                -found[0], -found[1], WINDOW, values["memory/after_sleep/rank"],
            )  # fmt: skip
        if (found := self._resident.add(values["memory/host_rss_gib"])) and is_first:
            logger.warning(
                "memory/host_rss_gib grew from %.2f to %.2f GiB within %d steps, on rank %d "
                "last (docs/debugging.md, Memory that creeps)",
                *found, WINDOW, values["memory/host_rss_rank"],
            )  # fmt: skip
