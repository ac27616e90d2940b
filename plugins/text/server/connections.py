"""Limits connections of clients that send slowly or not at all.

Uvicorn limits the time between requests, but not the time to receive a request.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 256
"""The largest number of clients at once, if the system allows a process four times as many files.
"""

RECEIVE_S = 20.0
"""The time limit for receiving a request's head and body."""

GRACE_S = 1.0
"""The time after which a connection without a request may be closed to admit another; until then,
there may be twice as many."""

LINGER_S = 2.0
"""The time in which a client can read the refusal of a request that was not fully received."""


class Connection(H11Protocol):
    """A client's connection, which is closed if receiving a request takes too long.

    If there are too many connections, the one that has been receiving longest is closed.
    """

    _opened = 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts to receive; closes a connection if there are too many."""
        super().connection_made(transport)
        self._opened = self.loop.time()
        many = len(self.connections) - most_connections()
        if many > 0:
            connections: set[Any] = self.connections
            waiting = [each for each in connections if each is not self and _idle(each)]
            oldest = min(waiting, key=lambda each: each._opened, default=self)
            if many < most_connections() and self._opened - oldest._opened < GRACE_S:
                oldest = None
            if oldest is not None:
                self.connections.discard(oldest)
                oldest.transport.abort()
        self._limit(RECEIVE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the time limit."""
        self._unlimit()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Limits the time from the first byte of a request to its last."""
        super().data_received(data)
        if not _idle(self):
            self._unlimit()
        elif self._deadline is None:
            self._limit(RECEIVE_S)

    def on_response_complete(self) -> None:
        """Skips the rest of a request that was answered before its end."""
        if self.cycle.more_body:
            self._unlimit()
            self._limit(LINGER_S)
        super().on_response_complete()

    def _limit(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _unlimit(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _idle(connection: Any) -> bool:
    """Whether a connection has no request that is being answered."""
    cycle = connection.cycle
    closing: bool = connection.transport.is_closing()
    return closing or cycle is None or cycle.more_body or cycle.response_complete


def most_connections() -> int:
    """Returns the largest number of connections, each of which is an open file."""
    if sys.platform == "win32":
        return MOST_CONNECTIONS
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else min(MOST_CONNECTIONS, files // 4)
