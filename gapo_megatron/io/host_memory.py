"""Host memory that is still available. Standard library only."""

from __future__ import annotations

from pathlib import Path


def available_bytes(
    proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Host memory that this process's job can still take: the node's, within the job's limit.

    The page cache counts as available, because the kernel drops it. Limits are those of control
    groups, of this process's group and all above it.

    Args:
        proc: where the kernel shows processes.
        control_groups: where it shows control groups.
    """
    available = _table(proc / "meminfo")["MemAvailable:"] * 2**10
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, own = line.split(":", 2)
        if number == "0":
            root, names, cached = control_groups, ("memory.max", "memory.current"), "file"
        elif "memory" in controllers.split(","):  # version 1
            root, cached = control_groups / "memory", "cache"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / own.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (folder / name for name in names)
            if limit.is_file() and (text := limit.read_text(encoding="utf-8").strip()) != "max":
                statistics = _table(folder / "memory.stat")
                # Without version 1's total_ a parent's numbers are its own processes'.
                whole = "total_" if f"total_{cached}" in statistics else ""
                cache = statistics[whole + cached] - statistics[f"{whole}shmem"]
                free = int(text) - int(used.read_text(encoding="utf-8")) + cache
                available = min(available, free)
    return available


def _table(path: Path) -> dict[str, int]:
    """The second word of every line, a number, by the first one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {words[0]: int(words[1]) for words in map(str.split, lines)}
