"""What the trainers do with generation ranks succeeds on all trainers, or fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from gapo_megatron.run.bridge import Bridge, LostRanksError

T = TypeVar("T")


def together(action: Callable[[], T], bridge: Bridge, gloo_group: dist.ProcessGroup) -> T:
    """What `action` returns, once it has returned on all trainers.

    Args:
        action: anything with the generation side; no collective of the trainers alone.
        bridge: this rank's end.
        gloo_group: all trainers.

    Collectives: a maximum of one integer over the trainers.

    Raises:
        LostRanksError: on all trainers, if generation ranks were lost before `action` has returned
            on each of them.
        Exception: whatever else `action` raises; the process must then end.
    """
    lost, result = None, None
    try:
        result = action()
    except Exception as error:
        lost = bridge.require_lost(error)
    has_lost = torch.tensor(lost is not None, dtype=torch.int64)
    if bridge.num_training > 1:
        dist.all_reduce(has_lost, op=dist.ReduceOp.MAX, group=gloo_group)
    if has_lost:
        raise lost or LostRanksError("generation ranks are gone")
    return cast(T, result)
