"""Command line of short programs on local ranks; runs that must survive use slurm/launch.sh."""

from __future__ import annotations

import sys


def ranks_command(module: str, num_ranks: int) -> list[str]:
    """`python -m module` on every rank, through torchrun if there are several."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [sys.executable, *(torchrun if num_ranks > 1 else []), "-m", module]
