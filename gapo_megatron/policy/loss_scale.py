"""Dynamic loss scaling in fp16, without which small gradients underflow."""

from __future__ import annotations

from dataclasses import dataclass

INITIAL = 2.0**24
"""About the number of response tokens in a large mini-batch, by which the loss is divided: the
gradient of a single token is then near 1."""
_LARGEST = 2.0**32
_GROWS_AFTER = 1000
"""Updates without an overflow after which the scale doubles."""


@dataclass
class LossScale:
    """The loss scale: a power of two, so that scaling and unscaling float32 is exact.

    It depends only on the norm of the whole gradient, so it is the same on every rank.
    Megatron-core's own scaler decides separately for each part of the optimizer (dense weights,
    experts), and the parts may then differ.
    """

    value: float = INITIAL
    num_overflows: int = 0
    """Passes whose gradient overflowed, and which were repeated with a smaller scale."""
    num_updates: int = 0
    """Updates since the scale last changed."""

    @property
    def may_halve(self) -> bool:
        """Whether a smaller scale may help; at 1 the gradient itself is not finite."""
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
