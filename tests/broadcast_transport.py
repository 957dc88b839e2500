"""A weight transport for tests: the first rank's tensors to the engines of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist
from torch import Tensor

from gapo_megatron.rollout.engine import Engine


def broadcast(
    engine: Engine,
    weights: Iterable[tuple[str, Tensor]],
    *,
    policy_version: int,
    on_received: Callable[[], None],
) -> None:
    """As `rollout.transport.Transport`. Collectives: those of `weights`, a broadcast of each."""

    def received() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            copy = tensor.clone()
            dist.broadcast(copy, src=0)
            yield name, copy

    engine.wake()
    engine.update_weights(received(), policy_version=policy_version, on_received=on_received)
