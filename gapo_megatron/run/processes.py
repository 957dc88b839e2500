"""Environment variables of launchers, and those that libraries read.

They give the launcher (torchrun, Slurm, or none), the rank, the launcher's folder and the end of
the job. Nothing else in `run/` or below reads or sets environment variables of a launcher.
Standard library only: command lines and dry runs use it before torch is imported.

`read_placement` and `launch_name` are pure functions of a mapping, so every launcher is tested
without one.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.errors import ConfigError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")

# Megatron-core's warnings at every step or build; a user can do nothing about them.
_MEGATRON_WARNINGS = (
    "Warning: tp_group is None",
    "full scope is deprecated",
    "When using async grad allreduce",
    "The .grad attribute of a Tensor that is not a leaf",
    r"`torch.distributed.\w+` is deprecated",
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank of this process and master address, from the environment; no master if it is alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True, slots=True)
class Launcher:
    """Variables that slurm/launch.sh sets in all processes of a start; listed in docs/slurm.md."""

    attempt: str = ""
    """Name of this start, `<job id>.<restart>` under Slurm; empty without a launcher."""
    folder: Path | None = None
    """`attempt_folder`."""
    job_end_unix_s: float | None = None
    """When the job's time limit ends it."""
    requeues: bool = False
    """Whether a run that stops is started again, on whatever nodes Slurm then has."""


def process_age_s() -> float:
    """Seconds since this process was started, imports included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot: proc_pid_stat(5), field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def placement() -> Placement:
    """This process's placement; see `read_placement`.

    Raises:
        ConfigError: see `read_placement`.
    """
    return read_placement(os.environ)


def world_size() -> int:
    """Processes of this launch, read without starting anything; used by a dry run.

    Raises:
        ConfigError: see `read_placement`.
    """
    return placement().world_size


def ranks_per_node() -> int:
    """Ranks on every node of this launch; see `read_ranks_per_node`.

    Raises:
        ConfigError: see `read_ranks_per_node`.
    """
    return read_ranks_per_node(os.environ)


def is_first() -> bool:
    """Whether this is rank 0, the only rank that inspects a shared folder.

    A shared disk may look different on other nodes.

    Raises:
        ConfigError: see `read_placement`.
    """
    return placement().rank == 0


def require_launcher(owner: str) -> None:
    """Refuse a rank that would not know that its job's launcher owns the run.

    Args:
        owner: attempt that owns the run folder.

    Raises:
        ConfigError: the launcher of this Slurm job owns the run, but its variables are missing.
    """
    job = os.environ.get("SLURM_JOB_ID")
    is_ours = bool(os.environ.get("SLURM_STEP_ID")) and owner.partition(".")[0] == job
    if is_ours and not launcher().attempt:
        raise ConfigError(
            f"GAPO_ATTEMPT is not set, but slurm/launch.sh of this job ({job}) owns the run: srun "
            "must pass its environment to the ranks (--export=ALL)"
        )


def stated_rank() -> str:
    """This process's rank as its launcher gives it, for messages; empty without a launcher."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or ""


def launcher() -> Launcher:
    """Variables set by this process's launcher; the defaults without a launcher."""
    end = os.environ.get("GAPO_JOB_END")
    return Launcher(
        attempt=os.environ.get("GAPO_ATTEMPT", ""),
        folder=attempt_folder(),
        job_end_unix_s=float(end) if end else None,
        requeues=bool(os.environ.get("GAPO_REQUEUES")),
    )


def attempt_folder() -> Path | None:
    """Folder in which launcher and ranks exchange files; None without a launcher."""
    folder = os.environ.get("GAPO_ATTEMPT_DIR")
    return Path(folder) if folder else None


def this_launch() -> str:
    """`launch_name` of this process's environment."""
    return launch_name(os.environ)


def is_under_torchrun() -> bool:
    """Whether torchrun has started this process, by `torchrun` or `python -m`."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID"))


def visible_gpus() -> str:
    """CUDA_VISIBLE_DEVICES, for messages."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "unset")


def quiet_libraries() -> None:
    """Silence messages of Megatron-core and vLLM that no user could act on.

    Every program calls it before it imports them: Megatron-core warns on import of every missing
    optional GPU package, vLLM of every CPU setting. Policy and engine log their own choices. A
    VLLM_LOGGING_LEVEL set by the user stays.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    for message in _MEGATRON_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def choose_cuda_queues(*, ranks_per_layer: int) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS=1 if layers are split over ranks. Call it before torch.

    A single hardware queue makes communication start before the computation that it overlaps with,
    as Megatron-core requires. Without split layers it would only serialise gradient reductions,
    pipeline messages and copies. A value set by the user stays.

    Args:
        ranks_per_layer: ranks that share a layer by tensor and context parallelism.
    """
    if ranks_per_layer > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def tell_vllm(placement: Placement, *, master_port: int) -> None:
    """Set the variables that vLLM's external launcher reads when it builds its engine.

    Args:
        placement: placement of this process.
        master_port: the port of `placement`, or a free port if it has none.
    """
    os.environ.update(
        {
            "RANK": str(placement.rank),
            "WORLD_SIZE": str(placement.world_size),
            "LOCAL_RANK": str(placement.local_rank),
            "MASTER_ADDR": placement.master_addr or "127.0.0.1",
            "MASTER_PORT": str(master_port),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Otherwise vLLM pins this process, the trainer's threads included, to cores it chooses.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    )


def read_placement(env: Mapping[str, str]) -> Placement:
    """Read the placement from torchrun's variables, else Slurm's; else a single process.

    Raises:
        ConfigError: variables are missing, malformed or contradict each other; names them.
    """
    given = [name for name in _TORCHRUN[:3] if env.get(name)]
    in_slurm_step = bool(env.get("SLURM_PROCID") and env.get("SLURM_STEP_ID"))
    if given:
        placement = _from_torchrun(env)
        # torchrun under srun numbers its own ranks; ranks exported by hand must match Slurm's.
        if in_slurm_step and not env.get("TORCHELASTIC_RUN_ID"):
            _require_agreement(env, placement)
    elif in_slurm_step:
        placement = _from_slurm(env)
    else:
        num_tasks = _integer(env, "SLURM_NTASKS") if env.get("SLURM_NTASKS") else 1
        if env.get("SLURM_PROCID") and num_tasks > 1:
            raise ConfigError(
                f"SLURM_NTASKS={num_tasks}, but this process is the batch script's own "
                "(no SLURM_STEP_ID): start the tasks with srun"
            )
        placement = Placement()
    _require_range(placement)
    return placement


def read_ranks_per_node(env: Mapping[str, str]) -> int:
    """Ranks on each node, from torchrun's variables, else those of Slurm's step, else all of them.

    Needed if whole nodes only generate: theirs are the last ranks.

    Raises:
        ConfigError: nodes have different numbers of ranks, or the ranks of a node are not
            consecutive; names variable, value and rule.
    """
    placement = read_placement(env)
    counts = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    found = [name for name in counts if env.get(name)]
    if env.get("RANK") and env.get("LOCAL_WORLD_SIZE"):
        size = _integer(env, "LOCAL_WORLD_SIZE")
    elif env.get("SLURM_STEP_ID") and found:
        size = _tasks_per_node(found[0], env[found[0]])
    else:
        size = placement.world_size
    if size < 1 or placement.local_rank != placement.rank % size:
        raise ConfigError(
            f"rank {placement.rank} has local rank {placement.local_rank} of {size} on its node: "
            "generation nodes need consecutive ranks on each node (Slurm: --distribution=block)"
        )
    return size


def _tasks_per_node(name: str, value: str) -> int:
    """Tasks on every node, from Slurm's list of them: `8(x4)` -> 8."""
    parts = value.split(",")
    matches = [re.fullmatch(r"(\d+)(?:\(x\d+\))?", part) for part in parts]
    sizes = {int(match[1]) for match in matches if match}
    if not all(matches):
        raise ConfigError(f"{name} ({value!r}) is not a Slurm list of tasks per node")
    if len(sizes) > 1:
        raise ConfigError(
            f"{name} ({value}) must be the same for all nodes: generation nodes need equally "
            "many ranks on each"
        )
    return sizes.pop()


def launch_name(env: Mapping[str, str]) -> str:
    """Name that a launcher gives to all ranks of this launch only; may be empty."""
    if attempt := env.get("GAPO_ATTEMPT"):
        return attempt
    if run_id := env.get("TORCHELASTIC_RUN_ID"):  # each node's torchrun may be a separate step
        return run_id
    step = env.get("SLURM_STEP_ID")
    return f"{env.get('SLURM_JOB_ID')}.{step}" if step else ""


def first_host(nodelist: str) -> str:
    """First host name of a Slurm node list: `gpu[007-009,12],cpu1` -> `gpu007`.

    Raises:
        ConfigError: the list is empty or has an unclosed bracket.
    """
    # A comma inside brackets separates numbers, outside it separates hosts.
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_NODELIST ({nodelist!r}) is not a Slurm node list")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _from_torchrun(env: Mapping[str, str]) -> Placement:
    missing = [name for name in _TORCHRUN if not env.get(name)]
    if missing:
        given = [f"{name}={env[name]}" for name in _TORCHRUN if env.get(name)]
        raise ConfigError(
            f"{', '.join(given)} is set, but {', '.join(missing)} is not: set all of "
            f"{', '.join(_TORCHRUN)} (torchrun does), or none"
        )
    return Placement(
        rank=_integer(env, "RANK"),
        world_size=_integer(env, "WORLD_SIZE"),
        local_rank=_integer(env, "LOCAL_RANK"),
        master_addr=env["MASTER_ADDR"],
        master_port=_integer(env, "MASTER_PORT"),
    )


def _from_slurm(env: Mapping[str, str]) -> Placement:
    # The step's own variables: a step may be smaller than the job's allocation.
    sizes = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if env.get(name)]
    lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = [name for name in lists if env.get(name)]
    missing = [name for name in _SLURM if not env.get(name)]
    missing += [] if sizes else ["SLURM_NTASKS"]
    missing += [] if nodes else ["SLURM_NODELIST"]
    if missing:
        raise ConfigError(f"SLURM_PROCID is set, but {', '.join(missing)} is not")
    port = env.get("MASTER_PORT")
    return Placement(
        rank=_integer(env, "SLURM_PROCID"),
        world_size=_integer(env, sizes[0]),
        local_rank=_integer(env, "SLURM_LOCALID"),
        master_addr=env.get("MASTER_ADDR") or first_host(env[nodes[0]]),
        # Below Linux's ephemeral ports (32768+), and different for jobs that share a node.
        master_port=_integer(env, "MASTER_PORT")
        if port
        else 20000 + (_integer(env, "SLURM_JOB_ID") + _integer(env, "SLURM_STEP_ID")) % 10000,
    )


def _require_agreement(env: Mapping[str, str], placement: Placement) -> None:
    size_name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    pairs = [
        ("RANK", placement.rank, "SLURM_PROCID"),
        ("WORLD_SIZE", placement.world_size, size_name),
        ("LOCAL_RANK", placement.local_rank, "SLURM_LOCALID"),
    ]
    for name, value, slurm_name in pairs:
        if env.get(slurm_name) and _integer(env, slurm_name) != value:
            raise ConfigError(
                f"{name}={value} contradicts {slurm_name}={env[slurm_name]}: "
                "unset one family of variables, or start with torchrun"
            )


def _require_range(placement: Placement) -> None:
    if not 0 <= placement.rank < placement.world_size:
        raise ConfigError(
            f"RANK ({placement.rank}) must be at least 0 and below WORLD_SIZE "
            f"({placement.world_size})"
        )
    if not 0 <= placement.local_rank <= placement.rank:
        raise ConfigError(
            f"LOCAL_RANK ({placement.local_rank}) must be at least 0 and at most RANK "
            f"({placement.rank})"
        )


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"{name} ({env[name]!r}) must be an integer") from None
