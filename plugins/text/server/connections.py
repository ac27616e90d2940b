"""Limits connections of clients that send slowly or not at all.

Uvicorn limits the time between requests, but not the time to receive a request.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
"""The largest number of connections, if the system allows a process four times as many files."""

REQUEST_S = 20.0
"""The time limit for receiving a request's headers and body."""

GRACE_S = 1.0
"""The time after which a connection without a request may be closed to admit another. Until then
there may be twice as many connections."""

LINGER_S = 2.0
"""The time in which a client can read the answer to a request that was not fully received."""


class Connection(H11Protocol):
    """A client's connection, which is closed if receiving a request takes too long.

    If there are too many connections, the oldest one without a complete request is closed.
    """

    _opened = 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time limit; closes a connection if there are too many."""
        super().connection_made(transport)
        self._opened = self.loop.time()
        excess = len(self.connections) - max_connections()
        if excess > 0:
            connections: set[Any] = self.connections
            waiting = [each for each in connections if each is not self and _is_idle(each)]
            oldest = min(waiting, key=lambda each: each._opened, default=self)
            if excess < max_connections() and self._opened - oldest._opened < GRACE_S:
                oldest = None
            if oldest is not None:
                self.connections.discard(oldest)
                oldest.transport.abort()
        self._set_limit(REQUEST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the time limit."""
        self._cancel_limit()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Limits the time from the first byte of a request to its last."""
        super().data_received(data)
        if not _is_idle(self):
            self._cancel_limit()
        elif self._deadline is None:
            self._set_limit(REQUEST_S)

    def on_response_complete(self) -> None:
        """Limits the time for the rest of a request that was answered before its end."""
        if self.cycle.more_body:
            self._cancel_limit()
            self._set_limit(LINGER_S)
        super().on_response_complete()

    def _set_limit(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_limit(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _is_idle(connection: Any) -> bool:
    """Returns whether a connection has no request that is being answered."""
    cycle = connection.cycle
    closing: bool = connection.transport.is_closing()
    return closing or cycle is None or cycle.more_body or cycle.response_complete


def max_connections() -> int:
    """Returns the largest number of connections, each of which is an open file."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if max_files < 0 else min(MAX_CONNECTIONS, max_files // 4)
