"""This process among its peers: device, process group, logging and seeds."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import random
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gapo_megatron.config import RolloutConfig
from gapo_megatron.config.counts import num_generation_ranks
from gapo_megatron.errors import ConfigError, MachineError, printable, shown
from gapo_megatron.run import processes
from gapo_megatron.run.bridge import Bridge
from gapo_megatron.run.cores import check_binding
from gapo_megatron.run.fail_fast import end_after
from gapo_megatron.run.presence import Layout
from gapo_megatron.run.processes import Placement

logger = logging.getLogger(__name__)

_GRACE_S = 10.0
"""Extra time beyond torch's own timeouts: torch retries some waits, and has no timeout for a port
that accepts a connection and never answers."""
_MOST_DIFFERENCES = 5
"""Largest number of differences in a message."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers; the process group is up.

    Peers are the colocated ranks; or, if some ranks only generate, the ranks of this process's
    side (training or generation), each side with its own default process group.
    """

    rank: int
    """Rank on this side."""
    world_size: int
    """Ranks of this side."""
    local_rank: int
    """Index among the processes of this node."""
    device: torch.device
    backend: str
    """`nccl` on GPUs, `gloo` on CPUs."""
    gloo_group: dist.ProcessGroup
    """All ranks of this side, for Python objects."""
    bridge: Bridge | None
    """Connection to the other side; None: every rank trains and generates."""


def start(
    timeout_s: float,
    *,
    alike: Mapping[str, Any] | None = None,
    rollout: RolloutConfig | None = None,
) -> World:
    """Set up logging, the process group and the variables vLLM reads. Call it once, first.

    Args:
        timeout_s: a collective, or the wait for the peers, that takes longer ends the process.
        alike: values by name that all ranks of a run share, compared as text: two runs on the same
            port must not be mixed.
        rollout: sets how many ranks only generate; None: no rank does.

    Collectives: creation of the default process group and of a gloo group, and a gather, by all
    ranks of a side; those of `Bridge` by the ranks of both.

    Raises:
        ConfigError: the environment contradicts itself (names the variables), or ranks differ in
            `alike` (names both ranks and the differences).
        MachineError: the port is taken, or peers do not connect or belong to another launch.
    """
    placement = processes.placement()
    processes.quiet_libraries()
    side = _choose_side(placement, rollout)
    configure_logging(side.rank, side.world_size, is_generation=side.name == "generation")
    device = _choose_device(placement)
    backend = "nccl" if device.type == "cuda" else "gloo"
    processes.tell_vllm(placement, master_port=placement.master_port or _free_port())
    if placement.master_addr:
        split = {"ranks that only generate": side.num_generation} if side.num_generation else {}
        store = _meet(placement, timeout_s, {**(alike or {}), **split})
    else:
        # In memory: a single process opens no port and leaves no file.
        store = dist.HashStore()
    gloo_group = _join_side(store, side, device, timeout_s)
    check_binding(device, gloo_group)
    bridge = None
    if side.num_generation:
        assert rollout is not None
        bridge = Bridge(
            store,
            Layout(
                placement.world_size - side.num_generation,
                side.num_generation,
                engine_ranks=rollout.tensor_parallel_size,
            ),
            rank=placement.rank,
            device=device,
            timeout_s=timeout_s,
            has_launcher=processes.attempt_folder() is not None,
        )
        if bridge.is_generation:
            bridge.break_too(gloo_group)
    faulthandler.cancel_dump_traceback_later()
    if side.rank == 0:
        name = side.name and f" of {side.name}"
        logger.info("%d rank(s)%s, %s, %s", side.world_size, name, backend, device.type)
    return World(
        rank=side.rank,
        world_size=side.world_size,
        local_rank=placement.local_rank,
        device=device,
        backend=backend,
        gloo_group=gloo_group,
        bridge=bridge,
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """Ranks that share a default process group, and this process's rank."""

    name: str
    """`training` or `generation`; empty where all ranks do both."""
    rank: int
    world_size: int
    num_generation: int
    """Ranks that only generate; the same on both sides."""


def _choose_side(placement: Placement, rollout: RolloutConfig | None) -> _Side:
    """This process's side: the last ranks of the job are those that only generate, if any."""
    rank, world_size = placement.rank, placement.world_size
    num_generation = 0
    if rollout is not None and rollout.has_generation_side:
        num_generation = num_generation_ranks(
            rollout,
            world_size=world_size,
            # Read only for whole nodes; otherwise nodes may have different numbers of ranks.
            ranks_per_node=processes.ranks_per_node() if rollout.generation_nodes else world_size,
        )
    num_training = world_size - num_generation
    if not num_generation:
        return _Side("", rank, world_size, 0)
    if rank < num_training:
        return _Side("training", rank, num_training, num_generation)
    return _Side("generation", rank - num_training, num_generation, num_generation)


def _join_side(
    store: dist.Store, side: _Side, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """Create the default process group of a side, and its gloo group. Collective over the side."""
    timeout = timedelta(seconds=timeout_s)
    end_after(timeout_s + _GRACE_S)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=side.rank,
        world_size=side.world_size,
        timeout=timeout,
        # As torch does itself: its keys and ours do not collide.
        store=dist.PrefixStore(f"default_pg{side.name and '_'}{side.name}", store),
    )
    if device.type == "cuda":
        # Not by `device_id` above: every later group, gloo groups included, would then split the
        # world's communicator at once, which all ranks would have to call in the same order.
        # The first collective binds the barriers of this group to this device.
        dist.barrier(device_ids=[device.index])
    return dist.new_group(backend="gloo", timeout=timeout)


def _meet(placement: Placement, timeout_s: float, alike: Mapping[str, Any]) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, after a check that it belongs to this run."""
    rank, timeout = placement.rank, timedelta(seconds=timeout_s)
    where = f"{placement.master_addr}:{placement.master_port} (MASTER_ADDR, MASTER_PORT)"
    end_after(timeout_s + _GRACE_S)
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, placement.world_size, timeout=timeout))
        store.set_timeout(timeout)
        recognize(store, rank, {**alike, "WORLD_SIZE": placement.world_size}, where=where)
    except dist.DistError as error:
        reason = printable(str(error).partition("\n")[0])
        if "EADDRINUSE" in reason:
            raise MachineError(
                f"rank 0 cannot listen at {where}: the port is taken, perhaps by another run; "
                "every run needs its own port"
            ) from None
        raise MachineError(
            f"rank {rank} did not reach the other ranks at {where} within parallel.timeout_s "
            f"({timeout_s:g} s): {type(error).__name__}: {reason}"
        ) from None
    return store


def recognize(store: dist.Store, rank: int, alike: Mapping[str, Any], *, where: str) -> None:
    """Check that rank 0 belongs to the same run, and that no other process has this rank.

    Called before any group exists: a process of another run fails here without disturbing this run.

    Args:
        store: the store at which these ranks have met.
        rank: this process's rank.
        alike: see `start`.
        where: address of the store, for errors.

    Raises:
        ConfigError: names both processes and their differences.
        MachineError: likewise, for processes of two launches; or another program has written to
            the store. Another port may work.
    """
    settings = {"launch": processes.this_launch(), **alike}
    mine = {
        "process": f"{socket.gethostname()}:{os.getpid()}",
        "alike": {name: str(value) for name, value in settings.items()},
    }
    if rank != 0:
        _require_same_run(
            rank, mine, 0, _read_rank(store.get(_rank_key(0)), _rank_key(0), where), where
        )
    name = _rank_key(rank)
    held = _read_rank(store.compare_set(name, "", json.dumps(mine)), name, where)
    if held != mine:
        _require_same_run(rank, mine, rank, held, where)
        raise ConfigError(
            f"{mine['process']} and {held['process']} at {where} are both rank {rank}: the run was "
            "started twice, or two processes have the same RANK"
        )


def _rank_key(rank: int) -> str:
    """Key in the store under which a rank describes its run."""
    return f"gapo_megatron/{rank}"


def _read_rank(text: bytes, name: str, where: str) -> dict[str, Any]:
    held: Any = None
    with contextlib.suppress(ValueError):
        held = json.loads(text)
    alike = held.get("alike") if isinstance(held, dict) else None
    if not (isinstance(alike, dict) and "launch" in alike and "process" in held):
        raise MachineError(
            f"{name} in the store at {where} ({shown(text)}) must be the description of a rank: "
            "another program uses this port"
        )
    return dict(held)


def _require_same_run(
    rank: int, mine: Mapping[str, Any], other_rank: int, other: Mapping[str, Any], where: str
) -> None:
    here, there = mine["alike"], other["alike"]
    differing = [name for name in here | there if here.get(name) != there.get(name)]
    if not differing:
        return
    named = [
        f"{name} ({here.get(name)} here, {there.get(name)} there)"
        for name in differing[:_MOST_DIFFERENCES]
    ]
    more = len(differing) - len(named)
    is_launched_twice = here["launch"] != there["launch"]
    raise (MachineError if is_launched_twice else ConfigError)(
        f"rank {rank} ({mine['process']}, launch {here['launch'] or 'by hand'}) met rank "
        f"{other_rank} ({other['process']}, launch {there['launch'] or 'by hand'}) of another run "
        f"at {where}: they differ in {', '.join(named)}{f' and {more} more' if more else ''}; give "
        "every rank of a run the same config, and every run its own port"
    )


def _choose_device(placement: Placement) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if placement.local_rank >= visible:
        raise ConfigError(
            f"LOCAL_RANK ({placement.local_rank}) has no GPU: CUDA_VISIBLE_DEVICES="
            f"{processes.visible_gpus()} shows {visible}; every task must "
            "see all GPUs of its node (Slurm: --gpus-per-node, not --gpus-per-task)"
        )
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    return device


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Formatter(logging.Formatter):
    """Escapes what a terminal would obey, whatever code has logged it."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), most=sys.maxsize, kept="\n\t")


def configure_logging(rank: int, num_ranks: int, *, is_generation: bool = False) -> None:
    """Log to stderr, with the rank as prefix: rank 0 from INFO, the others from WARNING.

    Args:
        rank: rank on this side.
        num_ranks: ranks of this side.
        is_generation: whether this side only generates; the prefix says so.
    """
    prefix = f"[rank {rank}] " if num_ranks > 1 else ""
    if is_generation:
        prefix = f"[generation {rank}] "
    handler = logging.StreamHandler()
    form = f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_Formatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.getLogger("gapo_megatron").setLevel(level)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, the same on every rank.

    Randomness that must differ between ranks comes from Megatron-core's RNG tracker, or from a
    seed per request (rollouts).
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
