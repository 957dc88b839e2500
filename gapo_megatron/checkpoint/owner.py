"""Protocol of the attempt that may write to a run's folder."""

from __future__ import annotations

from typing import Protocol


class Owner(Protocol):
    """One start of a run (`run.attempt.Attempt`)."""

    @property
    def name(self) -> str:
        """Unique among the starts of a run."""

    def alive(self) -> None:
        """Report progress of this rank."""

    def require_ownership(self) -> None:
        """Raise FencedError if a newer start has taken the run."""
