"""Who may write into a run's folder."""

from __future__ import annotations

from typing import Protocol


class Owner(Protocol):
    """One start of a run (`run.attempt.Attempt`)."""

    @property
    def name(self) -> str:
        """Unique among the starts of a run."""

    def alive(self) -> None:
        """Say that this rank makes progress."""

    def require_ownership(self) -> None:
        """Raise FencedError when a newer start has taken the run."""
