"""Host memory that a job can still take."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapo_megatron.io.host_memory import available_bytes

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """A node with 8 GiB available; this process is in the group /job/step."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "job/step").mkdir(parents=True)
    available = f"MemTotal: {16 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {8 * 2**20} kB\n"
    (proc / "meminfo").write_text(available)
    (proc / "self/cgroup").write_text("1:cpu:/other\n0::/job/step\n")
    return proc, groups


def limit(group: Path, most: int | str, *, used: int, cache: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    # Shared memory counts as files too, but cannot be dropped.
    statistics = f"anon {used - cache - GIB}\nfile {cache + GIB}\nshmem {GIB}\n"
    (group / "memory.stat").write_text(statistics)


def test_without_limits_it_is_the_nodes(machine: tuple[Path, Path]) -> None:
    assert available_bytes(*machine) == 8 * GIB
    limit(machine[1] / "job", "max", used=9 * GIB, cache=0)
    assert available_bytes(*machine) == 8 * GIB


def test_a_job_gets_what_is_left_of_its_limit(machine: tuple[Path, Path]) -> None:
    """Whichever group above has it; the page cache is as good as free."""
    limit(machine[1] / "job/step", 12 * GIB, used=9 * GIB, cache=2 * GIB)
    assert available_bytes(*machine) == 5 * GIB
    limit(machine[1] / "job", 12 * GIB, used=11 * GIB, cache=2 * GIB)
    assert available_bytes(*machine) == 3 * GIB


def test_limits_of_version_1_count_too(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    (proc / "self/cgroup").write_text("9:memory,hugetlb:/slurm/job\n1:cpu:/other\n0::/\n")
    job = groups / "memory/slurm/job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text(f"{12 * GIB}\n")
    (job / "memory.usage_in_bytes").write_text(f"{9 * GIB}\n")
    own = "cache 0\nshmem 0\n"  # of processes in the group itself
    (job / "memory.stat").write_text(f"{own}total_cache {3 * GIB}\ntotal_shmem {GIB}\n")
    assert available_bytes(*machine) == 5 * GIB
    (job / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")  # none
    assert available_bytes(*machine) == 8 * GIB
