"""Run a function on several ranks: processes of their own, gloo, a file store, one thread each."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import multiprocessing.context
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

from gapo_megatron.config import RolloutConfig
from gapo_megatron.run import process_group
from tests.waiting import HANG_S

SOAK = [pytest.mark.system, pytest.mark.soak]
"""Marks of the layouts that only `make test-soak` tries; each kind has some in an earlier stage."""

_STACKS_S = 5
"""Ranks that hang show their stacks so long before they are ended."""


def rank_context() -> mp.context.ForkServerContext:
    """Forks processes from a server that has imported what they need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `fn(*args)` on every rank of a fresh process group.

    Args:
        fn: a module-level function; called once the default group is up.
        world_size: number of ranks.
        args: picklable.

    Returns:
        What each rank returned, by rank; None if it left by `os._exit(0)`. Tensors must be on the
        CPU.

    Raises:
        AssertionError: carries the traceback of the rank that failed first, or where every rank
            was when the time was up.
    """
    return _run(_call_in_group, world_size, fn, world_size, args)


def run_sides(
    fn: Callable[..., Any],
    num_training: int,
    num_generation: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(world, *args)` on ranks that `process_group.start` has brought up, by job rank.

    Args:
        fn: a module-level function.
        num_training: ranks of the training side.
        num_generation: ranks that only generate; 0: there is one side.
        args: picklable.
        env: more environment variables of the ranks.

    Returns, raises: as `run_distributed`.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    placed = {
        "WORLD_SIZE": str(num_training + num_generation),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    env = {**placed, **(env or {})}
    return _run(_call_on_side, num_training + num_generation, fn, num_generation, env, args)


def _run(target: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `target(rank, folder, *args)` in `world_size` processes; what each has returned."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = rank_context()
        processes: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(target, rank, name, args))
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()
        results = [folder / f"result{rank}" for rank in range(world_size)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


@contextmanager
def single_rank() -> Iterator[None]:
    """A process group of one rank in this process, for code that always talks to its group."""
    gc.collect()  # the last group's sockets: its models hold it in reference cycles
    with tempfile.TemporaryDirectory() as folder:
        _join_group(0, 1, folder)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _wait(processes: list[BaseProcess], folder: Path) -> None:
    """Return when all ranks are done; the rank that failed first explains the others."""
    deadline = time.monotonic() + HANG_S
    running = dict(enumerate(processes))
    while running and time.monotonic() < deadline:
        wait([process.sentinel for process in running.values()], timeout=1.0)
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                if process.exitcode:
                    raise AssertionError(_first_failure(folder, rank, process.exitcode))
    if running:
        stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stacks*")))
        raise AssertionError(f"ranks {list(running)} still run after {HANG_S:.0f} s\n{stacks}")


def _first_failure(folder: Path, rank: int, exitcode: int) -> str:
    failures = sorted(folder.glob("failure*"), key=lambda path: path.stat().st_mtime_ns)
    if not failures:
        return f"rank {rank} ended with exit code {exitcode}"
    return f"{failures[0].name}:\n{failures[0].read_text()}"


def _join_group(rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=HANG_S),
    )


def _call_in_group(
    rank: int, folder: str, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]
) -> Any:
    _join_group(rank, world_size, folder)
    result = fn(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _call_on_side(
    rank: int,
    folder: str,
    fn: Callable[..., Any],
    num_generation: int,
    env: Mapping[str, str],
    args: tuple[Any, ...],
) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **env}
    rollout = RolloutConfig(max_response_tokens=1, generation_ranks=num_generation)
    world = process_group.start(HANG_S, rollout=rollout)
    with open(Path(folder) / f"stacks{rank}", "a") as stacks:  # `start` has a watch of its own
        _show_stacks_later(stacks)
        result = fn(world, *args)
        if world.bridge is not None:
            world.bridge.close()
        else:
            dist.barrier()
        dist.destroy_process_group()
    return result


def _show_stacks_later(file: IO[str]) -> None:
    faulthandler.dump_traceback_later(max(1, HANG_S - _STACKS_S), file=file)


def _rank_main(target: Callable[..., Any], rank: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    with open(Path(folder) / f"stacks{rank}", "w") as stacks:
        _show_stacks_later(stacks)
        try:
            result = target(rank, folder, *args)
            (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
        except BaseException:
            # Complete before it has the name the parent looks for.
            draft = Path(folder) / f"draft{rank}"
            draft.write_text(traceback.format_exc())
            draft.rename(Path(folder) / f"failure{rank}")
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
