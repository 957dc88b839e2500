"""Section `machine`: CPUs, memory, GPUs and their links, disk."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from gapo_megatron.launch import node_checks
from gapo_megatron.launch.node_checks import CommandError, run_command
from gapo_tools.diagnosis.finding import Finding, Status, from_check, judge

LOCAL_FILE_SYSTEMS = ("btrfs", "ext", "overlay", "ramfs", "tmpfs", "xfs", "zfs")


def num_gpus(env: Mapping[str, str]) -> int:
    """Number of GPUs that the driver shows and CUDA_VISIBLE_DEVICES allows."""
    try:
        return len(node_checks.visible_gpus(node_checks.read_gpus(), env))
    except CommandError:  # none; the check `gpus` reports missing ones
        return 0


def look_at_machine(env: Mapping[str, str]) -> Iterator[Finding]:
    """Check CPUs, memory, /dev/shm, GPUs and the links between them."""
    cores = len(os.sched_getaffinity(0))
    yield Finding("machine", "cpu", "ok", f"{cores} of {os.cpu_count()} cores, {platform.node()}")
    advice = "find the process that uses it: ps aux --sort -rss"
    yield from_check("machine", node_checks.check_memory(env), advice, bad="warn")
    yield from_check("machine", node_checks.check_shm(), "containers: --shm-size=16g or --ipc=host")
    advices = {
        "gpus": "see nvidia-smi and dmesg | grep -i xid; use another node, and tell the operators",
        "gpu_memory": "normal on a shared node; on the job's own node, look for stray processes",
        "gpu_errors": "the GPU needs a reset: tell the operators",
    }
    for check in node_checks.check_gpus(env):
        bad: Status = "warn" if check.name == "gpu_memory" else "fail"
        yield from_check("machine", check, advices[check.name], bad=bad)
    if shutil.which("nvidia-smi"):
        yield from _look_at_links()


def _look_at_links() -> Iterator[Finding]:
    try:
        gpus = node_checks.read_gpus()
        links = node_checks.parse_links(run_command("nvidia-smi", "topo", "-m"))
    except CommandError as error:
        yield Finding("machine", "nvlink", "warn", str(error))
        return
    if gpus:
        yield Finding("machine", "driver", "ok", gpus[0].driver)
    if links:
        shown = ", ".join(sorted(set(links)))
        advice = "tensor parallelism needs NVLink: keep it within GPUs that have it"
        good = all(link.startswith("NV") for link in links)
        yield judge("machine", "nvlink", good, f"GPUs are linked by {shown}", advice, bad="warn")


def look_at_run_dir(output_dir: str, *, on_cluster: bool) -> Iterator[Finding]:
    """Check the disk that runs are written to."""
    folder = Path(output_dir).absolute()
    folder = next(path for path in (folder, *folder.parents) if path.is_dir())
    advice = "choose another run.output_dir, or free space"
    yield from_check("machine", node_checks.check_run_dir(folder), advice)
    space = node_checks.check_disk_space(folder, min_free_gib=node_checks.MIN_FREE_GIB)
    yield from_check("machine", space, advice, bad="warn")
    kind = run_command("stat", "--file-system", "--format=%T", str(folder)).strip()
    good = not on_cluster or not kind.startswith(LOCAL_FILE_SYSTEMS)
    advice = f"{kind} is usually local to one machine; all nodes must see run.output_dir"
    yield judge("machine", "shared_disk", good, f"{folder} is on {kind}", advice, bad="warn")
