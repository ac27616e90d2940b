"""Who is next: one at a time, and what is short does not wait for all that is long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anyio


@dataclass(eq=False, slots=True)
class _WaitingText:
    size: float
    turn: anyio.Event


@dataclass(slots=True)
class Turns:
    """Turns of several that are at work at once.

    Half of the time is for the smallest, such as the text that has taken the least time so far,
    however many others there are; in the other half it goes by order of arrival.
    """

    _waiting: list[_WaitingText] = field(default_factory=list)
    _busy: bool = False
    _by_size: bool = False
    _ahead: float = 0.0
    """The seconds that went by size more than by arrival, since there was a choice."""

    @asynccontextmanager
    async def turn(self, size: float) -> AsyncIterator[None]:
        """Waits for the turn of one that has a size, and gives it on at the end."""
        import anyio

        if self._busy:
            waiting = _WaitingText(size, anyio.Event())
            self._waiting.append(waiting)
            try:
                await waiting.turn.wait()
            except BaseException:  # its client has gone
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
                else:  # the turn was given to it meanwhile
                    self._next()
                raise
        self._busy = True
        begun = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - begun
            self._ahead += took if self._by_size else -took
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if not self._busy:
            self._ahead = 0.0
            return
        self._by_size = self._ahead <= 0
        smallest = min(self._waiting, key=lambda each: each.size)
        chosen = smallest if self._by_size else self._waiting[0]
        self._waiting.remove(chosen)
        chosen.turn.set()
