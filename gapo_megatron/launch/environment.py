"""Who am I: rank and world size (`placement`), device, and the process group."""

from __future__ import annotations

import logging
import os
import random
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.errors import ConfigError
from gapo_megatron.launch.placement import Placement, read_placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers; the process group is up."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the processes of this node."""
    device: torch.device
    backend: str
    """`nccl` on GPUs, `gloo` on CPUs."""


def start(timeout_s: float, *, cpu_kv_cache_gib: int = 1) -> World:
    """Bring up logging, the process group and the variables vLLM reads. Call it once, first.

    Args:
        timeout_s: a collective that waits longer ends the process.
        cpu_kv_cache_gib: size of vLLM's KV cache on a CPU, in GiB per rank.

    Collectives: creation of the default process group, by all ranks.

    Raises:
        ConfigError: the environment contradicts itself; names the variables.
    """
    placement = read_placement(os.environ)
    configure_logging(placement.rank, placement.world_size)
    device = _choose_device(placement)
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.update(_vllm_environment(placement, cpu_kv_cache_gib=cpu_kv_cache_gib))
    alone = not placement.master_addr
    dist.init_process_group(
        backend,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
        # A store in memory: a lone process opens no port and leaves no file.
        store=dist.HashStore() if alone else None,
        init_method=None if alone else "env://",
    )
    if placement.rank == 0:
        logger.info("%d rank(s), %s, %s", placement.world_size, backend, device.type)
    return World(
        rank=placement.rank,
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        device=device,
        backend=backend,
    )


def share_of_cores() -> int:
    """Cores of this process over the ranks that run on the same ones.

    Collectives: one gather of objects over all ranks.
    """
    mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return max(1, len(mine[1]) // everyones.count(mine))


def _choose_device(placement: Placement) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if placement.local_rank >= visible:
        raise ConfigError(
            f"LOCAL_RANK ({placement.local_rank}) has no GPU: CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')} shows {visible}; every task must "
            "see all GPUs of its node (Slurm: --gpus-per-node, not --gpus-per-task)"
        )
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    return device


def _vllm_environment(placement: Placement, *, cpu_kv_cache_gib: int) -> dict[str, str]:
    """What vLLM's external launcher reads when its engine is built in this process."""
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "MASTER_ADDR": placement.master_addr or "127.0.0.1",
        "MASTER_PORT": str(placement.master_port or _free_port()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(cpu_kv_cache_gib),
        # vLLM would pin this process to cores of its own choice, the trainer's threads with it.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configure_logging(rank: int, num_ranks: int) -> None:
    """Send log lines to stderr: rank 0 from INFO, the others from WARNING; ranks in front."""
    prefix = f"[rank {rank}] " if num_ranks > 1 else ""
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.getLogger("gapo_megatron").setLevel(level)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, alike on every rank.

    Randomness that must differ between ranks is Megatron-core's tracker's, or is seeded per
    request (rollouts) by whoever draws.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
