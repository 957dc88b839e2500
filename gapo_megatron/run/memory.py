"""Memory of devices and hosts during a step, with a warning if it creeps up.

It is read at three moments of a step, and gathered from all ranks in one collective at its end:

    after_sleep   the engine has released its memory, no pass has begun
    update_peak   the peak since then: carried log-probs, old pass, updates, rounding
    after_wake    the engine has the new weights and its KV cache

`free` is the driver's free memory of the device. `reserved` is held by torch's allocator,
`allocated` is the part in use by tensors. Both still count vLLM's pools on this device while vLLM
sleeps and has released them, so compare these two only between steps.
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
"""Steps of the window in which growth is detected."""
_END = 5
"""Steps at each end of a window; growth is the difference of the two ends' medians."""
_LEAST_TAU = 0.8
_FEW, _MUCH_GIB = 5, 0.75
"""Consecutive steps, and GiB of growth at each of them, that warn before a window is full."""
_LEAST_DEVICE_GIB, _LEAST_HOST_GIB = 1 / 32, 1 / 4
"""GiB of growth over a window that warn."""
_GIB = 2**30


class DeviceMemory(NamedTuple):
    """Memory of a device in bytes; see the module."""

    allocated: int
    reserved: int
    free: int


Read = Callable[[bool], DeviceMemory | None]
"""Reads memory: the peak since the last reading if True, else now. None without a device."""


def device_reader(device: torch.device) -> Read:
    """Return a function that reads a GPU's memory; every reading resets the peak."""

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
    """Resident bytes of this process, pinned memory included, worker processes excluded."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Growth:
    """Detects a value that grows steadily, as opposed to one that varies or jumps once.

    Uses Kendall's tau of the last `WINDOW` values: the share of pairs that rise minus the share
    that fall. It is 1 for steady growth, 0.5 for a single jump, and within 0.5 of 0 for values that
    only vary. Growth means: tau is at least 0.8, and the median of the last five values is at least
    `least` above that of the first five. Or: five values in a row, each at least 0.75 GiB above all
    before; memory may then run out before the window is full.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._values: list[float] = []

    def add(self, value: float) -> tuple[float, float] | None:
        """Add the value of a step.

        Returns:
            Values before and after the growth (medians of the window's ends, or single values), or
            None without growth. After a growth, detection restarts with the next step.
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
    """Records the memory use of steps.

    Args:
        device: this rank's device.
        read: replaces the device's reading, for tests.
    """

    def __init__(self, device: torch.device, *, read: Read | None = None) -> None:
        self._read = read or device_reader(device)
        self._seen: dict[str, DeviceMemory] = {}
        self._used, self._resident = Growth(_LEAST_DEVICE_GIB), Growth(_LEAST_HOST_GIB)

    def note(self, moment: str) -> None:
        """Read the device at one of `MOMENTS`; every rank must read at the same ones.

        `update_peak` is measured since `after_sleep`; a resumed step without it has none.
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
            The same on every rank, in GiB: `memory/host_rss_gib`, the maximum over ranks, and
            `memory/host_rss_rank`, its rank; for each moment of a device
            `memory/{moment}/free_gib`, the minimum, `memory/{moment}/rank`, its rank, and
            `.../allocated_gib`, `.../reserved_gib`, the maxima.

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
                "memory/after_sleep/free_gib fell from %.2f to %.2f GiB within %d steps, last on "
                "rank %d: device memory is likely leaking (docs/debugging.md, Memory that creeps)",
                -found[0], -found[1], WINDOW, values["memory/after_sleep/rank"],
            )  # fmt: skip
        if (found := self._resident.add(values["memory/host_rss_gib"])) and is_first:
            logger.warning(
                "memory/host_rss_gib grew from %.2f to %.2f GiB within %d steps, last on "
                "rank %d (docs/debugging.md, Memory that creeps)",
                *found, WINDOW, values["memory/host_rss_rank"],
            )  # fmt: skip
