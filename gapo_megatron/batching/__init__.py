"""Batching: which rank computes which sequences (`plan`), and their packed tensors (`pack`)."""

from gapo_megatron.batching.pack import NO_SEQUENCES, pack, sequence_lengths, unpack
from gapo_megatron.batching.plan import plan

__all__ = ["NO_SEQUENCES", "pack", "plan", "sequence_lengths", "unpack"]
