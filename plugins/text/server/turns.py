"""Gives turns to several texts, one at a time, with priority for short ones."""

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
"""The share of the time for the smallest text."""

KEPT_S = 0.002
"""How long a turn is reserved for the smallest text before another text gets it."""


Size = tuple[float, float]
"""The largest number of tokens of a text and, to order equals, the seconds that it has used."""


class Returning(Protocol):
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
    """The seconds beyond their share that went by size, since there was a choice."""
    _kept_for: Returning | None = None
    _kept: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, size: Size, owner: Returning | None = None) -> AsyncIterator[None]:
        """Waits for a turn, and passes it on at the end.

        An `owner` returns for more turns; if it is the smallest, its next turn is reserved briefly.
        """
        chosen = True  # among several
        if self._kept is not None and self._kept_for is owner:
            self._end_keeping()
            self._by_size = True
        elif self._busy:
            await self._wait(size)
        else:
            chosen = False
        self._busy = True
        begun, returns = perf_counter(), False
        try:
            yield
            returns = owner is not None and owner.finish is None
        finally:
            took = perf_counter() - begun
            if chosen:
                self._count(took, by_size=self._by_size)
            now = (size[0], size[1] + took)
            smallest = all(now <= other.size for other in self._waiting)
            if returns and self._waiting and smallest and self._ahead <= 0:
                self._kept_for = owner
                self._kept = asyncio.get_running_loop().call_later(KEPT_S, self._give_up)
            else:
                self._next()

    async def _wait(self, size: Size) -> None:
        import anyio

        waiting = _WaitingText(size, anyio.Event())
        self._waiting.append(waiting)
        try:
            await waiting.turn.wait()
        except BaseException:  # its client has disconnected
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # it got the turn in the meantime
                self._next()
            raise

    def _count(self, seconds: float, *, by_size: bool) -> None:
        self._ahead += seconds * (1 - SHARE if by_size else -SHARE)

    def _end_keeping(self) -> None:
        assert self._kept is not None
        self._kept.cancel()
        self._kept, self._kept_for = None, None

    def _give_up(self) -> None:
        """Ends the reservation of the smallest text, and counts the wait as its time."""
        self._end_keeping()
        self._count(KEPT_S, by_size=True)
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
