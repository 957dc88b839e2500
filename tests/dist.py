"""Run a function on several ranks: processes of their own, gloo, a file store, one thread each."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import multiprocessing.context
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.waiting import HANG_S

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
        What each rank returned, by rank. Tensors must be on the CPU.

    Raises:
        AssertionError: carries the traceback of the rank that failed first, or where every rank
            was when the time was up.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = rank_context()
        processes: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, name, args))
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
        return [pickle.loads((folder / f"result{r}").read_bytes()) for r in range(world_size)]


@contextmanager
def single_rank() -> Iterator[None]:
    """A process group of one rank in this process, for code that always talks to its group."""
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


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    with open(Path(folder) / f"stacks{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(max(1, HANG_S - _STACKS_S), file=stacks)
        try:
            _join_group(rank, world_size, folder)
            result = fn(*args)
            (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            # Complete before it has the name the parent looks for.
            draft = Path(folder) / f"draft{rank}"
            draft.write_text(traceback.format_exc())
            draft.rename(Path(folder) / f"failure{rank}")
            raise SystemExit(1) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
