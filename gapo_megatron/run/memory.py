"""Memory of devices and hosts during a step.

It is read at three moments of a step, and gathered from all ranks in one collective at its end:

    after_sleep   the engine has released its memory, no pass has begun
    update_peak   the peak since then: carried log-probs, old pass, updates, rounding
    after_wake    the engine has the new weights and its KV cache

`free` is the driver's free memory of the device. `reserved` is held by torch's allocator,
`allocated` is the part in use by tensors. Both still count vLLM's pools on this device while vLLM
sleeps and has released them, so compare these two only between steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

MOMENTS = ("after_sleep", "update_peak", "after_wake")
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


class StepMemory:
    """Records the memory use of steps.

    Args:
        device: this rank's device.
        read: replaces the device's reading, for tests.
    """

    def __init__(self, device: torch.device, *, read: Read | None = None) -> None:
        self._read = read or device_reader(device)
        self._seen: dict[str, DeviceMemory] = {}

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
        gathered = mine.new_empty(dist.get_world_size(group), len(mine))
        dist.all_gather(list(gathered), mine, group=group)
        ranks = gathered / _GIB
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
        return values
