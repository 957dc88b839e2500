"""The cores that ranks run on: a share for each, and whether ranks are bound to the right ones."""

from __future__ import annotations

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class RankCores:
    """Cores of one rank."""

    host: str
    allowed: frozenset[int]
    """Cores that this process may run on."""
    num_here: int
    """Cores of the node."""
    near_gpu: frozenset[int] = frozenset()
    """Cores of the GPU's NUMA node; empty: there is no GPU, or the system does not say."""


def check_binding(device: torch.device, group: dist.ProcessGroup) -> None:
    """Warn, on rank 0, of ranks that are bound to the wrong cores; `find_misbound`.

    Collectives: one gather of objects over the ranks of `group`.
    """
    near = _near(device) if device.type == "cuda" else frozenset()
    mine = RankCores(
        socket.gethostname(), frozenset(os.sched_getaffinity(0)), os.cpu_count() or 1, near
    )
    if found := find_misbound(_gather(mine, group)):
        logger.warning(
            "%s: this costs speed. srun binds tasks to cores (--cpu-bind, and SLURM_CPU_BIND in "
            "slurm/site.sh)",
            "; ".join(found),
        )


def find_misbound(ranks: Sequence[RankCores]) -> list[str]:
    """What is wrong with the cores of ranks, in words; the first node of each kind stands for all.

    - The ranks of a node share fewer cores than there are ranks, and the node has more.
    - A rank may not run on any core near its GPU.
    """
    found = []
    by_host = defaultdict(list)
    for rank, cores in enumerate(ranks):
        by_host[cores.host].append((rank, cores))
    for host, here in by_host.items():
        together = frozenset[int]().union(*(cores.allowed for _, cores in here))
        if len(together) < min(len(here), here[0][1].num_here):
            found.append(
                f"the {len(here)} ranks on {host} share core {_listed(together)} of "
                f"{here[0][1].num_here}"
            )
            break
    far = [
        f"rank {rank} on {cores.host} runs on cores {_listed(cores.allowed)}, its GPU is near "
        f"cores {_listed(cores.near_gpu)}"
        for rank, cores in enumerate(ranks)
        if cores.near_gpu and not cores.near_gpu & cores.allowed
    ]
    if far:
        found.append(far[0] + (f" (and {len(far) - 1} more ranks)" if far[1:] else ""))
    return found


def share_of_cores() -> int:
    """Cores of this process divided by the number of ranks that share them.

    Collectives: one gather of objects over all ranks.
    """
    mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
    return max(1, len(mine[1]) // _gather(mine, None).count(mine))


def parse_cores(text: str) -> frozenset[int]:
    """Cores of Linux's list of them: `0-3,8` -> 0, 1, 2, 3, 8."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(
        core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)
    )


def _gather(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def _near(device: torch.device) -> frozenset[int]:
    """Cores near a GPU, from Linux's list of PCI devices."""
    found: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return parse_cores((_PCI_DEVICES / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):  # a container or a driver that hides it
        return frozenset()


def _listed(cores: frozenset[int]) -> str:
    """`parse_cores` backwards."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
