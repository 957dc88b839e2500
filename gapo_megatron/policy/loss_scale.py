"""The factor of the loss in fp16, without which small gradients would round to zero."""

from __future__ import annotations

from dataclasses import dataclass

INITIAL = 2.0**24
"""About the response tokens of a large mini-batch: the loss is divided by their number, and a
token's own gradient is then near 1."""
_LARGEST = 2.0**32
_GROWS_AFTER = 1000
"""Updates without an overflow after which the scale doubles."""


@dataclass
class LossScale:
    """Dynamic loss scaling: a power of two, so that scaling and unscaling float32 is exact.

    It changes by the norm of the whole gradient alone, which is the same on every rank: so is the
    scale. Megatron-core's own scaler decides for each part of the optimizer by itself (dense
    weights, experts), which may then differ.
    """

    value: float = INITIAL
    num_overflows: int = 0
    """Passes so far whose gradient overflowed, and which were repeated at a smaller scale."""
    num_updates: int = 0
    """Updates since the scale has changed."""

    @property
    def may_halve(self) -> bool:
        """Whether a smaller scale may make a gradient finite; at 1 it is not finite for itself."""
        return self.value > 1

    def overflowed(self) -> None:
        """Halve the scale."""
        self.value, self.num_updates = self.value / 2, 0
        self.num_overflows += 1

    def updated(self) -> None:
        """Count an update; the scale doubles after many without an overflow."""
        self.num_updates += 1
        if self.num_updates == _GROWS_AFTER and self.value < _LARGEST:
            self.value, self.num_updates = self.value * 2, 0
