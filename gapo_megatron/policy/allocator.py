"""Expandable segments of torch's allocator while the policy computes. Not yet run on a GPU.

Packed micro-batches have all lengths, so memory freed by one rarely fits the next. Expandable
segments are mapped page by page, and free pieces of any size merge.
"""

from __future__ import annotations

import torch

from gapo_megatron.compat.torch import allocator_settings, set_allocator_settings

_OPTION = "expandable_segments"


class ExpandableSegments:
    """Switches `expandable_segments` on for the policy's passes, and off for everything else.

    vLLM must not allocate from such segments: the memory pools of its sleep mode do not support
    them (pytorch#147851; it switches them off for these pools, but not while capturing CUDA
    graphs), nor does the memory that its all-reduce shares with other processes. Existing
    allocations are not affected by a switch.

    Other settings in PYTORCH_ALLOC_CONF are kept; if it sets this option, nothing is switched.
    Versions of torch before 2.13, which cannot report their settings, are left alone.
    """

    def __init__(self, device: torch.device) -> None:
        settings = allocator_settings() if device.type == "cuda" else None
        # Every change must repeat them, because torch resets settings that are not named.
        self._others = None if settings is None or _OPTION in settings else settings

    def use(self, enabled: bool) -> None:
        """Turn expandable segments on or off for later allocations."""
        if self._others is not None:
            settings = filter(None, [self._others, f"{_OPTION}:{enabled}"])
            set_allocator_settings(",".join(settings))
