"""The time limit of a search: the time left, and the time that a step and the end take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...common.timing import Protocol

TRIAL, RUN, OPEN, WAYS = "trial", "run", "open", "ways"
"""Steps of a search: trying a whole graph; running it over the search's half; writing and opening
it; timing it with other lowerings."""

TRACE, EFFECT = "trace", "effect"
"""Steps: tracing a model, and trying one choice of one layer."""

UNTOUCHED_SHARE, RANGES_SHARE, TIMES_SHARE, EFFECTS_SHARE, TRIALS_SHARE = 0.1, 0.3, 0.5, 0.6, 0.85
"""The share of the time limit that has passed when each phase ends: the untouched model's outputs,
the ranges, timing single layers, changing single layers, whole graphs. The rest is for training the
most promising points. The time for confirming and writing does not count."""

LAST_SHARE = 0.5
"""The share of the remaining time that the last training takes."""

FEWEST, END_SHARE = 4, 0.35
"""Time is reserved to confirm `FEWEST` points, including the model as trained, up to `END_SHARE` of
the time left; time for two points is always reserved."""

VERIFIED = 64
"""The number of the search's inputs on which the bundle is compared with PyTorch, by layer."""

EACH_SIDE = 4
"""The number of points tried on each side of the point where a path ends."""

TRIALS = 24
"""The largest number of neighbours of a path's best points that are tried as whole graphs."""

INPUTS = 4
"""The number of batches that are timed in turn."""

QUICK = Protocol(rounds=5, warmup=2, round_s=0.02, inputs=INPUTS)
"""The protocol for one trial."""

CAREFUL = Protocol(rounds=7, warmup=3, round_s=0.1, inputs=INPUTS)
"""The protocol for the graphs of the front, which are timed in turn."""

SHORT_MS, MORE_QUICK, MORE_CAREFUL = 5.0, 9, 15
"""Graphs faster than `SHORT_MS` are timed in more and shorter rounds: a machine may change its
speed within tenths of a second, and the median over many rounds is then more reliable."""

SPIN_MS = 1.0
"""How long the runtime's threads spin after a call of a layer or a short graph. The calls take as
long as with the usual 35 ms, but the next case need not wait until the threads rest, which would
take four fifths of a short round."""


def protocol_for(ms: float, *, careful: bool = False) -> Protocol:
    """Returns the timing protocol for the graphs of a model that takes `ms` as trained."""
    if ms >= SHORT_MS:
        return CAREFUL if careful else QUICK
    return replace(QUICK, rounds=MORE_CAREFUL if careful else MORE_QUICK)


def spin_for(ms: float) -> float | None:
    """Returns how long threads spin between calls of a graph that takes `ms` (None: the default).

    A long graph may run on one thread for longer than `SPIN_MS`; the others would fall asleep.
    """
    return SPIN_MS if ms < SHORT_MS else None


TRAINING_S, TRAINING_SHARE = 4.0, 0.15
"""How long the training for one graph takes: these seconds, and at most this share of the remaining
time."""


class Clock:
    """The time limit of a search; without `seconds` there is none.

    Steps cannot be interrupted, so a step starts only if the longest of its kind so far would still
    end in time. `reserve` is the time for confirming and writing, of which writing takes
    `writing_s`. The clock starts now, or at `started`.
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
        """Whether one more step of a kind would exceed a share of the search's time."""
        used = self.seconds - self.left if math.isfinite(self.seconds) else 0.0
        return used + self.longest.get(step, 0.0) > share * (self.seconds - self.reserve)

    def training_s(self, step: str, share: float = TRAINING_SHARE) -> float:
        """How long the training for one point may take."""
        usual = max(TRAINING_S, self.longest.get(step, 0.0))
        return min(usual, share * max(0.0, self.left - self.reserve))

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Measures the time of a step of a kind within the context."""
        began = self._now()
        yield
        self.longest[kind] = max(self.longest.get(kind, 0.0), self._now() - began)


@dataclass(frozen=True, slots=True)
class End:
    """The estimated time that the end of a search takes, in seconds: per point, and once.

    Each point is written, opened and timed, then opened again to run over the confirming half.
    """

    timing_s: float
    confirming_s: float
    once_s: float

    def reserve_s(self, left_s: float) -> float:
        """Returns the part of the remaining time to reserve: for `FEWEST` points, or for fewer."""
        points = (END_SHARE * left_s - self.once_s) / (self.timing_s + self.confirming_s)
        count = min(FEWEST, max(2, math.floor(min(FEWEST, points))))
        return count * (self.timing_s + self.confirming_s) + self.once_s

    def points_within(self, left_s: float, *, timed: bool) -> float:
        """Returns how many points fit into the time; those that are not `timed` are timed first."""
        each_s = self.confirming_s + (0.0 if timed else self.timing_s)
        return (left_s - self.once_s) / each_s
