"""Gives turns to several texts, one at a time, and prefers short ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import anyio

SHARE = 0.8
"""The share of the time that the smallest text gets."""

RESERVED_S = 0.002
"""How long a turn is reserved for the smallest text before another text gets it."""


Size = tuple[float, float]
"""The largest number of tokens of a text and, to order equal ones, the seconds that it used."""


class TurnTaker(Protocol):
    """An object that takes turns until it has ended, such as a `GeneratedText`."""

    @property
    def finish(self) -> object:
        """Why it ended; None until then."""
        ...


@dataclass(eq=False, slots=True)
class _WaitingText:
    size: Size
    turn: anyio.Event


@dataclass(slots=True)
class Turns:
    """Gives turns to several texts that are generated at once.

    Four fifths of the time go to the smallest text (the fewest requested tokens), however many
    others there are; the rest goes to texts in the order of their arrival.
    """

    _waiting: list[_WaitingText] = field(default_factory=list)
    _busy: bool = False
    _by_size: bool = False
    _ahead: float = 0.0
    """How many seconds more than their share the smallest texts got while several waited."""
    _reserved_for: TurnTaker | None = None
    _reservation: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, size: Size, owner: TurnTaker | None = None) -> AsyncIterator[None]:
        """Waits for a turn, and passes it on at the end.

        An `owner` returns for more turns; if it is the smallest, its next turn is reserved briefly.
        """
        competed = True  # with other texts
        if self._reservation is not None and self._reserved_for is owner:
            self._cancel_reservation()
            self._by_size = True
        elif self._busy:
            await self._wait(size)
        else:
            competed = False
        self._busy = True
        started, returns = perf_counter(), False
        try:
            yield
            returns = owner is not None and owner.finish is None
        finally:
            took = perf_counter() - started
            if competed:
                self._account(took, by_size=self._by_size)
            now = (size[0], size[1] + took)
            smallest = all(now <= other.size for other in self._waiting)
            if returns and self._waiting and smallest and self._ahead <= 0:
                self._reserved_for = owner
                self._reservation = asyncio.get_running_loop().call_later(RESERVED_S, self._expire)
            else:
                self._next()

    async def _wait(self, size: Size) -> None:
        import anyio

        waiting = _WaitingText(size, anyio.Event())
        self._waiting.append(waiting)
        try:
            await waiting.turn.wait()
        except BaseException:  # the client has disconnected
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # the text got its turn in the meantime
                self._next()
            raise

    def _account(self, seconds: float, *, by_size: bool) -> None:
        self._ahead += seconds * (1 - SHARE if by_size else -SHARE)

    def _cancel_reservation(self) -> None:
        assert self._reservation is not None
        self._reservation.cancel()
        self._reservation, self._reserved_for = None, None

    def _expire(self) -> None:
        """Ends the reservation of the smallest text, and counts the wait as its time."""
        self._cancel_reservation()
        self._account(RESERVED_S, by_size=True)
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
