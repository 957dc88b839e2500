"""Starting a process of the run; the only reader of SLURM_*, RANK and MASTER_ADDR."""

from gapo_megatron.launch.environment import (
    World,
    fail_fast,
    seed_everything,
    start,
    world_size,
)

__all__ = ["World", "fail_fast", "seed_everything", "start", "world_size"]
