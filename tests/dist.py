"""Run a function on several ranks: spawned processes, gloo, a file store, one thread each."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 180


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `fn(*args)` on every rank of a fresh process group.

    Args:
        fn: a module-level function; called once the default group is up.
        world_size: number of ranks.
        args: picklable.

    Returns:
        What each rank returned, by rank. Tensors must be on the CPU.

    Raises:
        AssertionError: carries the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, folder, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result{r}").read_bytes()) for r in range(world_size)]


def _wait(processes: list[Any], folder: Path) -> None:
    deadline = TIMEOUT_S * 4
    for _ in range(deadline):
        # The rank that failed first explains the others, which only lost their peer.
        failures = sorted(folder.glob("failure*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            raise AssertionError(f"{failures[0].name}:\n{failures[0].read_text()}")
        for rank, process in enumerate(processes):
            if process.exitcode not in (None, 0):
                raise AssertionError(f"rank {rank} ended with exit code {process.exitcode}")
        if all(process.exitcode == 0 for process in processes):
            return
        next(p for p in processes if p.exitcode is None).join(0.25)
    raise AssertionError(f"ranks still running after {TIMEOUT_S} s")


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        result = fn(*args)
        partial = Path(folder) / f"result{rank}"
        partial.write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        partial = Path(folder) / f"partial{rank}"
        partial.write_text(f"rank {rank} of {world_size}\n{traceback.format_exc()}")
        partial.rename(Path(folder) / f"failure{rank}")
        raise SystemExit(1) from None
