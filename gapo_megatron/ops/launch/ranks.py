"""Short programs on ranks of this machine; what is to survive a stop goes by slurm/launch.sh."""

from __future__ import annotations

import sys


def ranks_command(module: str, num_ranks: int) -> list[str]:
    """`python -m module` on every rank: by torchrun, where there are several."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [sys.executable, *(torchrun if num_ranks > 1 else []), "-m", module]
