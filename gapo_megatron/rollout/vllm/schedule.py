"""Who owns the GPU's memory: the engine and the trainer take turns.

    generating -> sleep() -> sleeping -> wake_for_sync() -> receiving -> wake_for_generation() ->

Asleep (vLLM's level 2) the engine holds neither weights nor KV cache. It wakes by tags: first the
weights' memory, which the sync fills, and only then the KV cache, so that the trainer's shards and
the cache are never both at their largest. On a CPU nothing is released, but the order is the same
and is checked there too: after a sleep, weights exist again only once a sync has brought them.
"""

from __future__ import annotations

import enum

import torch

from gapo_megatron.compat.vllm import LLMEngine
from gapo_megatron.errors import RolloutError


class Phase(enum.StrEnum):
    """Phase of the engine, which decides what it can do."""

    GENERATING = "generating"
    SLEEPING = "sleeping"
    RECEIVING = "receiving"
    """Memory for the weights is there, the KV cache is not."""


class Schedule:
    """The engine's phase, and the only callers of vLLM's sleep and wake_up."""

    def __init__(self, engine: LLMEngine, device: torch.device) -> None:
        self.phase = Phase.GENERATING
        self._engine = engine
        self._releases_memory = device.type == "cuda"

    def require(self, phase: Phase, action: str) -> None:
        """Raise RolloutError when `action` is asked for in another phase."""
        if self.phase is not phase:
            raise RolloutError(f"{action} needs a {phase} engine, but it is {self.phase}")

    def require_awake(self, action: str) -> None:
        """Raise RolloutError when `action` is asked for while the trainer has the memory."""
        if self.phase is Phase.SLEEPING:
            raise RolloutError(f"{action} needs an engine that is awake, but it is {self.phase}")

    def sleep(self) -> None:
        """Give up weights and KV cache. Nothing happens when already asleep."""
        if self.phase is Phase.SLEEPING:
            return
        self.require(Phase.GENERATING, "sleep")
        if self._releases_memory:
            self._engine.sleep(level=2)
        self.phase = Phase.SLEEPING

    def wake_for_sync(self) -> None:
        """Take back memory for the weights; they are undefined until a sync has filled them.

        An engine that is awake stays as it is: the sync then overwrites weights in place.
        """
        if self.phase is Phase.SLEEPING:
            if self._releases_memory:
                torch.cuda.empty_cache()  # vLLM maps memory past torch's allocator
                self._engine.wake_up(tags=["weights"])
            self.phase = Phase.RECEIVING

    def wake_for_generation(self) -> None:
        """Take back memory for the KV cache, after a sync."""
        if self.phase is Phase.RECEIVING:
            if self._releases_memory:
                torch.cuda.empty_cache()
                self._engine.wake_up(tags=["kv_cache"])
            self.phase = Phase.GENERATING
