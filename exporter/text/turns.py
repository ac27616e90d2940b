"""Who computes next: one at a time, and a new text does not wait for long ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anyio


@dataclass(eq=False, slots=True)
class _Waiting:
    steps: int
    turn: anyio.Event


@dataclass(slots=True)
class Turns:
    """Turns of texts that are written at once.

    Every other turn is that of the text with the fewest steps so far, so that a short one has half
    of the machine at least, however many long ones there are; the others are by order of arrival.
    """

    _waiting: list[_Waiting] = field(default_factory=list)
    _busy: bool = False
    _by_steps: bool = False

    @asynccontextmanager
    async def turn(self, steps: int) -> AsyncIterator[None]:
        """Waits for the turn of a text that has had some steps, and gives it on at the end."""
        import anyio

        if self._busy:
            waiting = _Waiting(steps, anyio.Event())
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
        self._by_steps = not self._by_steps
        fewest = min(self._waiting, key=lambda each: each.steps)
        chosen = fewest if self._by_steps else self._waiting[0]
        self._waiting.remove(chosen)
        chosen.turn.set()
