"""Checks of one node: GPUs, disk, memory, packages. For the preflight and tools/doctor.py.

Fast: only the standard library is used, and packages are looked up without importing them. The GPU
checks read nvidia-smi. They were tested on examples of its output; NOT YET RUN ON A GPU.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.compat.megatron_version import check_version
from gapo_megatron.errors import ConfigError, GapoError

GIB = 2**30
MAX_GPU_MEMORY_USED_MIB = 1024
"""More than an idle driver uses; above it, another process is on the GPU."""
MIN_SHM_GIB = 1.0
"""Free space of /dev/shm, through which NCCL and vLLM processes share data; containers default to
64 MiB."""
MIN_MEMORY_SHARE = 0.25
"""Share of the job's host memory that must be free before it starts."""
MIN_FREE_GIB = 10.0
"""Default of the free disk space that a run needs."""
PACKAGES = (
    "antlr4",
    "httpx",
    "langdetect",
    "latex2sympy2_extended",
    "math_verify",
    "megatron.core",
    "mpmath",
    "numpy",
    "pydantic",
    "rich",
    "safetensors",
    "scipy",
    "starlette",
    "sympy",
    "torch",
    "transformers",
    "uvicorn",
    "vllm",
)
"""Packages that training imports."""

_COMMAND_TIMEOUT_S = 30.0
_GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
)


class CommandError(GapoError, RuntimeError):
    """A system program is missing, failed or hangs; the message is its output."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    ok: bool
    detail: str
    """Result in a few words; if not ok, also what was expected."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One line of nvidia-smi; None for `[N/A]`."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    uncorrected_errors: int | None
    """Memory errors since the driver was loaded that ECC could not correct."""


def run_command(
    *command: str, env: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> str:
    """Run a system program and return its standard output.

    Args:
        command: the program and its arguments.
        env: its environment; None for this process's.
        timeout_s: time limit; None for 30 seconds.

    Raises:
        CommandError: the program is missing, its exit code is not 0, or it exceeds the limit.
    """
    timeout_s = _COMMAND_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env
        )
    except FileNotFoundError:
        raise CommandError(f"no {command[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"{command[0]} did not answer within {timeout_s:.0f} s") from None
    if done.returncode:
        # Programs and tracebacks put the cause in the last line.
        said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        said = said.removeprefix(f"{command[0]}: ") or f"exit code {done.returncode}"
        raise CommandError(f"{command[0]}: {said}")
    return done.stdout


def check_local(env: Mapping[str, str], *, run_dir: str | Path, min_free_gib: float) -> list[Check]:
    """All checks of this node that need no other node.

    Args:
        env: environment of the Slurm task.
        run_dir: folder of the run; created if it does not exist.
        min_free_gib: free disk space to require there.
    """
    return [
        check_run_dir(run_dir),
        check_disk_space(run_dir, min_free_gib=min_free_gib),
        check_memory(env),
        check_shm(),
        check_packages(),
        check_cache(env),
        *check_gpus(env),
    ]


def check_run_dir(run_dir: str | Path) -> Check:
    """Create the folder if needed; write 1 MiB through to the disk and read it back."""
    data = os.urandom(2**20)
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir) as probe:
            probe.write(data)
            probe.flush()
            os.fsync(probe.fileno())
            probe.seek(0)
            same = probe.read() == data
    except OSError as error:
        return Check("run_dir", False, f"{run_dir} cannot be written: {error.strerror}")
    return Check(
        "run_dir",
        same,
        f"{run_dir} " + ("is writable" if same else "reads back wrongly"),
    )


def check_disk_space(run_dir: str | Path, *, min_free_gib: float) -> Check:
    """Free space of the file system; quotas are not considered."""
    return _free_space("disk_space", run_dir, min_free_gib)


def check_memory(env: Mapping[str, str]) -> Check:
    """Free host memory, as a share of the memory that Slurm gave the job or of the node's."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    given = min(kib["MemTotal"] / 2**20, int(env.get("SLURM_MEM_PER_NODE") or 0) / 2**10 or 2**40)
    available = kib["MemAvailable"] / 2**20
    return _at_least("memory", available, MIN_MEMORY_SHARE * given, f"GiB available of {given:.0f}")


def check_shm() -> Check:
    """Free space of /dev/shm."""
    return _free_space("shm", "/dev/shm", MIN_SHM_GIB)


def check_packages() -> Check:
    """Whether this interpreter finds the packages that training imports, none of them too old."""
    missing = [name for name in PACKAGES if not _is_there(name)]
    interpreter = f"{sys.executable} ({platform.python_version()})"
    if missing:
        return Check("packages", False, f"{interpreter} does not find {', '.join(missing)}")
    try:
        check_version()
    except ConfigError as error:
        return Check("packages", False, f"{interpreter}: {error}")
    return Check("packages", True, f"{interpreter} finds all {len(PACKAGES)}")


def check_cache(env: Mapping[str, str]) -> Check:
    """Whether CACHE_DIR, with compiled kernels, is writable for this user and for no other.

    Its name is easy to guess, and its content is executed. Creates the folder if needed.
    """
    folder = env.get("CACHE_DIR", "")
    if not folder:
        return Check("cache", True, "each library uses its own")
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        return Check("cache", False, f"CACHE_DIR ({folder}) must be a folder: {error}")
    mode, owner = status.st_mode, status.st_uid
    if not stat.S_ISDIR(mode) or owner != os.getuid() or mode & 0o022:
        detail = f"{stat.filemode(mode)} of user {owner}; must be a folder of user {os.getuid()}"
        return Check("cache", False, f"CACHE_DIR ({folder}): {detail} that no other user can write")
    return Check("cache", True, folder)


def check_gpus(env: Mapping[str, str]) -> list[Check]:
    """Number, used memory and memory errors of the GPUs that this job may use."""
    wanted = int(env.get("SLURM_GPUS_ON_NODE") or 0)
    if not wanted and shutil.which("nvidia-smi") is None:
        return [Check("gpus", True, "none requested, no nvidia-smi")]
    try:
        gpus = visible_gpus(read_gpus(), env)
        used = check_gpu_memory(gpus)
    except CommandError as error:
        return [Check("gpus", not wanted, f"{wanted} requested; {error}")]
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    seen = f"{len(gpus)} of {wanted} requested: {names}" if wanted else f"{len(gpus)}: {names}"
    return [Check("gpus", len(gpus) >= wanted, seen), used, check_gpu_errors(gpus)]


def check_gpu_memory(gpus: list[GpuState]) -> Check:
    """GPU memory in use before the job starts, such as that of an earlier job's process.

    Raises:
        CommandError: nvidia-smi cannot list the processes.
    """
    busy = [gpu for gpu in gpus if (gpu.memory_used_mib or 0) > MAX_GPU_MEMORY_USED_MIB]
    most = max((gpu.memory_used_mib or 0 for gpu in gpus), default=0)
    if not busy:
        return Check("gpu_memory", True, f"at most {most} MiB in use")
    uuids = {gpu.uuid for gpu in busy}
    listed = run_command(
        "nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits"
    )
    rows = [_cells(line) for line in listed.splitlines() if line.strip()]
    pids = sorted({row[1] for row in rows if row[0] in uuids}, key=lambda pid: (len(pid), pid))
    by_whom = f"processes {', '.join(pids)}" if pids else "processes that nvidia-smi does not list"
    which = ", ".join(f"GPU {gpu.index}: {gpu.memory_used_mib} MiB" for gpu in busy)
    limit = f"at most {MAX_GPU_MEMORY_USED_MIB} MiB may be in use"
    return Check("gpu_memory", False, f"{which}, by {by_whom}; {limit}")


def check_gpu_errors(gpus: list[GpuState]) -> Check:
    """Uncorrected memory errors: such a GPU needs a reset before it can be trusted."""
    bad = [f"GPU {gpu.index}: {gpu.uncorrected_errors}" for gpu in gpus if gpu.uncorrected_errors]
    return Check("gpu_errors", not bad, f"uncorrected memory errors: {', '.join(bad) or 'none'}")


def read_gpus() -> list[GpuState]:
    """All GPUs that nvidia-smi shows.

    Raises:
        CommandError: nvidia-smi failed or printed something else, or a GPU fell off its bus.
    """
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    return parse_gpus(run_command("nvidia-smi", query, "--format=csv,noheader,nounits"))


def parse_gpus(text: str) -> list[GpuState]:
    """Parse lines such as `0, GPU-5f1b..., NVIDIA H200, 575.57.08, 143771, 4, 0`.

    Raises:
        CommandError: a line has another form.
    """
    gpus = []
    for line in filter(str.strip, text.splitlines()):
        cells = _cells(line)
        # A lost GPU may answer `[GPU is lost]` or `[Unknown Error]` field by field.
        if len(cells) != len(_GPU_FIELDS) or "lost" in line or "Error" in line:
            raise CommandError(f"nvidia-smi: {line}")
        index, uuid, name, driver, *numbers = cells
        gpus.append(GpuState(int(index), uuid, name, driver, *map(_number, numbers)))
    return gpus


def parse_links(matrix: str) -> list[str]:
    """Kind of link (NV18, PIX, NODE, SYS, ...) of each pair of GPUs in `nvidia-smi topo -m`."""
    rows = [line.split("\t") for line in matrix.splitlines() if re.match(r"GPU\d+\t", line)]
    table = [[cell.strip() for cell in row[1 : len(rows) + 1]] for row in rows]
    return [table[i][j] for i in range(len(rows)) for j in range(i + 1, len(rows))]


def visible_gpus(gpus: list[GpuState], env: Mapping[str, str]) -> list[GpuState]:
    """GPUs in CUDA_VISIBLE_DEVICES; all if it is not set or names MIG instances.

    If Slurm confines devices, nvidia-smi shows the job's GPUs, numbered from 0 like the variable;
    otherwise both number all GPUs of the node.
    """
    setting = env.get("CUDA_VISIBLE_DEVICES")
    if setting is None or "MIG" in setting:
        return gpus
    named = _cells(setting)
    return [gpu for gpu in gpus if str(gpu.index) in named or gpu.uuid in named]


def _number(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() else None


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _free_space(name: str, folder: str | Path, minimum_gib: float) -> Check:
    try:
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return Check(name, False, f"{folder}: {error.strerror}")
    return _at_least(name, free, minimum_gib, f"GiB free in {folder}")


def _at_least(name: str, value: float, minimum: float, what: str) -> Check:
    enough = value >= minimum
    return Check(name, enough, f"{value:.1f} {what}" + ("" if enough else f", below {minimum:g}"))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
