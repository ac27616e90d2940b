"""Who is next: one at a time, and what is short does not wait for all that is long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anyio

SHARE = 0.8
"""Of the time, for the smallest."""

KEPT_S = 0.002
"""How long the smallest may take to come back for its next turn before another has it."""


Size = tuple[float, float]
"""What a text may take at the most, in tokens, and among equals the seconds that it has taken."""


@dataclass(eq=False, slots=True)
class _WaitingText:
    size: Size
    owner: object
    turn: anyio.Event


@dataclass(slots=True)
class Turns:
    """Turns of several that are at work at once.

    Four fifths of the time are for the smallest, such as the text of which the fewest tokens are
    asked for, however many others there are; in the rest it goes by order of arrival.
    """

    _waiting: list[_WaitingText] = field(default_factory=list)
    _busy: bool = False
    _by_size: bool = False
    _ahead: float = 0.0
    """The seconds that went by size more than their share, since there was a choice."""
    _kept_for: object = None
    _kept: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, size: Size, owner: object = None) -> AsyncIterator[None]:
        """Waits for the turn of one that has a size, and gives it on at the end.

        An `owner` is one that comes again: where it is the smallest, its next turn is kept a while.
        """
        import anyio

        if self._kept is not None and self._kept_for is owner:
            self._end_keeping()
            self._by_size = True
        elif self._busy:
            waiting = _WaitingText(size, owner, anyio.Event())
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
            self._ahead += took * (1 - SHARE if self._by_size else -SHARE)
            now = (size[0], size[1] + took)
            smallest = all(now <= other.size for other in self._waiting)
            if owner is not None and self._waiting and smallest and self._ahead <= 0:
                self._kept_for = owner
                self._kept = asyncio.get_running_loop().call_later(KEPT_S, self._give_up)
            else:
                self._next()

    def _end_keeping(self) -> None:
        assert self._kept is not None
        self._kept.cancel()
        self._kept, self._kept_for = None, None

    def _give_up(self) -> None:
        """The smallest has not come back."""
        self._end_keeping()
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
