"""Transports: ways for the policy's weights to get to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from gapo_megatron.rollout.engine import Engine


class Transport(Protocol):
    """Brings the policy's weights to the engine, which generates with them afterwards."""

    def __call__(
        self,
        engine: Engine,
        weights: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        on_received: Callable[[], None],
    ) -> None:
        """Hand every tensor to `Engine.update_weights`.

        Args:
            engine: asleep or awake; awake afterwards, at `policy_version`.
            weights: `Policy.iterate_hf_weights`, to be run through to its end on every rank.
            policy_version: steps the weights have been trained for.
            on_received: called when the tensors are of no more use, before the engine takes memory
                for its KV cache.

        Collectives: those of `weights`, in lockstep on all ranks, and the transport's own.

        Raises:
            WeightSyncError: see `Engine.update_weights`.
        """


def in_place(
    engine: Engine,
    weights: Iterable[tuple[str, Tensor]],
    *,
    policy_version: int,
    on_received: Callable[[], None] = lambda: None,
) -> None:
    """The `Transport` to an engine in the trainer's own process, which has every tensor."""
    engine.wake()
    engine.update_weights(weights, policy_version=policy_version, on_received=on_received)
