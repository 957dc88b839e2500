"""The error of a request."""

from __future__ import annotations


class RefusedError(Exception):
    """A request that cannot be answered: an error of status 400 for the agent."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status
