"""What is left of a search's time, and how long its steps take: one begins only where it fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRAINING_S, TRAINING_SHARE = 4.0, 0.15
"""What the training for a whole graph takes: so many seconds, and at most a share of those left."""


class Clock:
    """The time of a search; without `seconds` nothing ends it.

    Steps cannot be interrupted, so each begins only if one like the longest of its kind so far
    still ends in time. `reserve` is what confirming and writing will take, of which the writing
    takes `writing_s`. It starts now, or at `started` of the same clock.
    """

    def __init__(
        self,
        seconds: float | None,
        now: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.reserve = self.writing_s = 0.0
        self.longest: dict[str, float] = {}
        self._now, self._started = now, now() if started is None else started

    @property
    def left(self) -> float:
        """Seconds until the end, negative after it."""
        return self.seconds - (self._now() - self._started)

    def over(self, share: float = 1.0, step: str = "") -> bool:
        """Whether one more step of a kind would end after a share of the time for searching."""
        used = self.seconds - self.left if math.isfinite(self.seconds) else 0.0
        return used + self.longest.get(step, 0.0) > share * (self.seconds - self.reserve)

    def training_s(self, step: str, share: float = TRAINING_SHARE) -> float:
        """How long the training for one point may take: some seconds, or as a step of a kind."""
        usual = max(TRAINING_S, self.longest.get(step, 0.0))
        return min(usual, share * max(0.0, self.left - self.reserve))

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Within the context a step of a kind is done; its time is kept."""
        began = self._now()
        yield
        self.longest[kind] = max(self.longest.get(kind, 0.0), self._now() - began)
