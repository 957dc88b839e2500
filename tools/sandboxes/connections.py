"""Connections to a server of ours: those that have not authenticated are few, and end soon."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

_MOST = 1024
"""Connections that may wait for a key at once, if the process may have four times as many files."""
_WAIT_S = 30
"""Seconds in which a connection must bring a key."""
_QUIET_S = 60
"""Seconds between two lines of the log about trouble of one kind."""


class Strangers:
    """Connections that have not sent a key: since they began, or since their last request.

    Used in the event loop's thread alone.
    """

    def __init__(self, where: str) -> None:
        """Start without connections; `where` says in messages what they are connected to."""
        self._where = where
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = min(_MOST, files // 4) if files != resource.RLIM_INFINITY else _MOST
        self._waiting: dict[Any, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}
        """Connections without a key by client address, oldest first."""
        self._said: dict[str, float] = {}
        """Kinds of messages, and when the last was logged."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, client: Any, transport: asyncio.Transport) -> None:
        """Close this connection in a while, and the oldest at once if there are too many."""
        if client in self._waiting:
            return
        timer = asyncio.get_running_loop().call_later(_WAIT_S, self._close, client)
        self._waiting[client] = transport, timer
        if len(self._waiting) > self._most:
            self._close(next(iter(self._waiting)))

    def discard(self, client: Any) -> None:
        """This connection has sent a key, or has ended."""
        if client in self._waiting:
            self._waiting.pop(client)[1].cancel()

    def _close(self, client: Any) -> None:
        transport, _ = self._waiting[client]
        self.discard(client)
        transport.abort()
        self._say(
            "closed",
            f"connections to {self._where} are closed: after {_WAIT_S} s, or the oldest of more "
            f"than {self._most}. A port scan?",
        )

    def on_error(self, loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        """The event loop's exception handler."""
        self._say(about["message"], f"{about['message']}: {about.get('exception')!r}")

    def _say(self, kind: str, message: str) -> None:
        """Log the first message of a kind, and then one a minute."""
        now = asyncio.get_running_loop().time()
        if now - self._said.get(kind, -_QUIET_S) >= _QUIET_S:
            self._said[kind] = now
            logger.warning("%s", message)


def protocol_of(strangers: Strangers) -> type[asyncio.Protocol]:
    """Uvicorn's protocol, whose connections are strangers until the app discards them."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            strangers.add(self.client, transport)

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:  # a new request begins
                strangers.add(self.client, self.transport)
            super().data_received(data)

        def connection_lost(self, error: Exception | None) -> None:
            strangers.discard(self.client)
            super().connection_lost(error)

    return Connection
