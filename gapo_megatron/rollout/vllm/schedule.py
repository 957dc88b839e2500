"""Turns of engine and trainer in using the GPU's memory.

    generating -> sleep() -> sleeping -> wake_for_sync() -> receiving -> wake_for_generation() ->

Asleep (vLLM's level 2) the engine holds neither weights nor KV cache. It wakes by tags: first the
weights' memory, which the sync fills, and only then the KV cache, so that the trainer's shards and
the cache never reach their maximum together. On a CPU nothing is released, but the order is the
same and is checked too: after a sleep the weights are undefined until a sync.

With an adapter asleep means vLLM's level 1: the weights beneath it, which only the first sync of a
start brings, wait in host memory and return when their memory is allocated.
"""

from __future__ import annotations

import enum

import torch

from gapo_megatron.compat.vllm import LLMEngine
from gapo_megatron.errors import RolloutError


class Phase(enum.StrEnum):
    """Phase of the engine, which decides what it may do."""

    GENERATING = "generating"
    SLEEPING = "sleeping"
    RECEIVING = "receiving"
    """The memory of the weights is allocated, the KV cache is not."""


class Schedule:
    """Keeps the engine's phase; the only caller of vLLM's sleep and wake_up."""

    def __init__(
        self, engine: LLMEngine, device: torch.device, *, keeps_weights: bool = False
    ) -> None:
        """Begin awake; `keeps_weights` in host memory while the engine sleeps."""
        self.phase = Phase.GENERATING
        self._level = 1 if keeps_weights else 2
        self._engine = engine
        self._releases_memory = device.type == "cuda"

    def require(self, phase: Phase, action: str) -> None:
        """Raise RolloutError if the engine is not in `phase`, which `action` needs."""
        if self.phase is not phase:
            raise RolloutError(f"{action} needs a {phase} engine, but it is {self.phase}")

    def require_awake(self, action: str) -> None:
        """Raise RolloutError if the engine is asleep, so that `action` is impossible."""
        if self.phase is Phase.SLEEPING:
            raise RolloutError(f"{action} needs an engine that is awake, but it is {self.phase}")

    def sleep(self) -> None:
        """Release weights and KV cache. Does nothing if already asleep."""
        if self.phase is Phase.SLEEPING:
            return
        self.require(Phase.GENERATING, "sleep")
        if self._releases_memory:
            self._engine.sleep(level=self._level)
        self.phase = Phase.SLEEPING

    def wake_for_sync(self) -> None:
        """Allocate memory for the weights.

        They are undefined until a sync has filled them, unless the host has kept them.
        Does nothing if the engine is awake: the sync then overwrites weights in place.
        """
        if self.phase is Phase.SLEEPING:
            if self._releases_memory:
                torch.cuda.empty_cache()  # vLLM allocates outside torch's allocator
                self._engine.wake_up(tags=["weights"])
            self.phase = Phase.RECEIVING

    def wake_for_generation(self) -> None:
        """Allocate memory for the KV cache, after a sync."""
        if self.phase is Phase.RECEIVING:
            if self._releases_memory:
                torch.cuda.empty_cache()
                self._engine.wake_up(tags=["kv_cache"])
            self.phase = Phase.GENERATING
