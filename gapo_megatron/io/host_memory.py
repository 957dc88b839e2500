"""Host memory that is still available. Standard library only."""

from __future__ import annotations

from pathlib import Path


def available_bytes(
    proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Host memory that this process's job can still take: the node's, within the job's limit.

    The page cache counts as available, because the kernel drops it. Limits are those of control
    groups version 2, of this process's group and all above it.

    Args:
        proc: where the kernel shows processes.
        control_groups: where it shows control groups.
    """
    available = _table(proc / "meminfo")["MemAvailable:"] * 2**10
    own = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()[-1].split(":")[2]
    group = control_groups / own.lstrip("/")
    for folder in (group, *group.parents):
        limit = folder / "memory.max"
        if limit.is_file() and (text := limit.read_text(encoding="utf-8").strip()) != "max":
            statistics = _table(folder / "memory.stat")
            cache = statistics["file"] - statistics["shmem"]
            current = int((folder / "memory.current").read_text(encoding="utf-8"))
            available = min(available, int(text) - current + cache)
    return available


def _table(path: Path) -> dict[str, int]:
    """The second word of every line, a number, by the first one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {words[0]: int(words[1]) for words in map(str.split, lines)}
