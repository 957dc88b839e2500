"""Which binding of ranks to cores is worth a warning."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.run import cores
from gapo_megatron.run.cores import RankCores, find_misbound, parse_cores
from tests.dist import run_distributed
from tests.messages import mentions

NEAR = parse_cores("0-3"), parse_cores("4-7")
"""Cores of the two NUMA nodes of a machine of eight."""


def ranks_of(*allowed: str, num_gpus: int = 0, host: str = "a") -> list[RankCores]:
    """Ranks of a node; the GPUs of the first half are near its first NUMA node."""
    return [
        RankCores(host, parse_cores(one), 8, NEAR[2 * i // num_gpus] if num_gpus else frozenset())
        for i, one in enumerate(allowed)
    ]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (ranks_of("0-1", "2-3", "4-5", "6-7", num_gpus=4), []),
        (ranks_of(*["0-7"] * 4, num_gpus=4), []),  # not bound
        (ranks_of(*["0-7"] * 12), []),  # more ranks than cores
        (ranks_of("0", "1"), []),
        (ranks_of("2", "2"), ["2 ranks on a", "core 2 of 8"]),
        (ranks_of("0-1", host="a") + ranks_of("5", "5", "5", host="b"), ["3 ranks on b"]),
        (
            ranks_of("4-5", "6-7", "0-1", "4-5", num_gpus=4),
            ["rank 0 on a", "cores 4-5", "cores 0-3", "2 more"],
        ),
        (ranks_of("0-1", "2-3", "4-5", "0,3", num_gpus=4), ["rank 3 on a", "cores 0,3", "4-7"]),
    ],
)
def test_ranks_on_the_wrong_cores_are_named(ranks: list[RankCores], words: list[str]) -> None:
    found = "; ".join(find_misbound(ranks))
    assert bool(found) == bool(words)
    assert re.search(mentions(*words), found)


def test_cores_near_a_gpu_are_those_that_linux_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(cores, "_PCI_DEVICES", tmp_path)
    assert cores._near(device) == frozenset()
    folder = tmp_path / "0000:1b:02.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-1,8\n")
    assert cores._near(device) == {0, 1, 8}


def _on_one_core() -> list[str]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    said: list[str] = []
    cores.logger.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign]
    cores.check_binding(torch.device("cpu"), dist.new_group(backend="gloo"))
    return said


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_two_ranks_on_one_core_say_so() -> None:
    first, _ = run_distributed(_on_one_core, world_size=2)
    assert re.search(mentions("2 ranks", socket.gethostname(), "--cpu-bind"), first[0])
