"""Batching: which rank computes which sequences (`plan`), and their packed tensors (`pack`)."""

from gapo_megatron.batching.pack import NO_SEQUENCES, pack, unpack
from gapo_megatron.batching.plan import plan

__all__ = ["NO_SEQUENCES", "pack", "plan", "unpack"]
