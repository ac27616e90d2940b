"""Who is next: one at a time, and what is short does not wait for all that is long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anyio


@dataclass(eq=False, slots=True)
class _Waiting:
    size: int
    turn: anyio.Event


@dataclass(slots=True)
class Turns:
    """Turns of several that are at work at once.

    Every other turn is that of the smallest, such as the text with the fewest steps so far: it has
    half of the machine at least, however many others there are. The others are by order of arrival.
    """

    _waiting: list[_Waiting] = field(default_factory=list)
    _busy: bool = False
    _by_size: bool = False

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Waits for the turn of one that has a size, and gives it on at the end."""
        import anyio

        if self._busy:
            waiting = _Waiting(size, anyio.Event())
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
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if not self._busy:
            return
        self._by_size = not self._by_size
        smallest = min(self._waiting, key=lambda each: each.size)
        chosen = smallest if self._by_size else self._waiting[0]
        self._waiting.remove(chosen)
        chosen.turn.set()
