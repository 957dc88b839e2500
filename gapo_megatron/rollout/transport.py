"""Transports, which send the policy's weights to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from gapo_megatron.rollout.engine import Engine


class Transport(Protocol):
    """Sends the policy's weights to the engine, which is awake afterwards."""

    def __call__(
        self,
        engine: Engine,
        weights: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        on_received: Callable[[], None],
    ) -> None:
        """Pass every tensor to `Engine.update_weights`.

        Args:
            engine: asleep or awake; awake afterwards, at `policy_version`.
            weights: `Policy.iterate_hf_weights`, consumed completely on every rank.
            policy_version: number of steps that the weights have been trained for.
            on_received: called when the tensors are no longer needed, before the engine allocates
                its KV cache.

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
    """`Transport` to an engine in the trainer's own process."""
    engine.wake()
    engine.update_weights(weights, policy_version=policy_version, on_received=on_received)
