"""How torch's allocator takes memory from a GPU while the policy computes.

Packed micro-batches have all lengths, so memory that one gave back rarely fits the next. Segments
that expand are mapped page by page, and pieces of any size join. Not yet run on a GPU.
"""

from __future__ import annotations

import torch

from gapo_megatron.compat.torch import allocator_settings, set_allocator_settings

_OPTION = "expandable_segments"


class ExpandableSegments:
    """Switches `expandable_segments` on for the policy's passes, and off for all else.

    vLLM must not allocate from such segments: its sleep mode's pools do not take them
    (pytorch#147851; it switches them off where it builds these pools, but not where it captures
    CUDA graphs), and its all-reduce shares memory with other processes in a way that mapped pages
    do not support. What was allocated before a switch stays as it is.

    Settings of the environment (PYTORCH_ALLOC_CONF) stay, and one that names this option decides.
    A torch without a way to read them (before 2.13, the version this is written for) is left alone.
    """

    def __init__(self, device: torch.device) -> None:
        settings = allocator_settings() if device.type == "cuda" else None
        # All of them go with every change: torch resets those that are not named.
        self._others = None if settings is None or _OPTION in settings else settings

    def use(self, enabled: bool) -> None:
        """Turn expandable segments on or off for later allocations."""
        if self._others is not None:
            settings = filter(None, [self._others, f"{_OPTION}:{enabled}"])
            set_allocator_settings(",".join(settings))
