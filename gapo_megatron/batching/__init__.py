"""Which rank computes what (`plan`), and the packed tensors it computes on (`pack`)."""

from gapo_megatron.batching.pack import pack, sequence_lengths, unpack
from gapo_megatron.batching.plan import plan

__all__ = ["pack", "plan", "sequence_lengths", "unpack"]
