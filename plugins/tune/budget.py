"""The time limit of a search: the time left, and how long steps and the end take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...common.timing import Protocol

TRIAL, RUN, OPEN, LOWERINGS = "trial", "run", "open", "lowerings"
"""Steps of a search: trying a whole graph; running it on the search's half; writing and opening it;
timing it with other lowerings."""

TRACE, EFFECT = "trace", "effect"
"""Steps of a search: tracing a model; trying one choice for one layer."""

UNTOUCHED_SHARE, RANGES_SHARE, TIMES_SHARE, EFFECTS_SHARE, TRIALS_SHARE = 0.1, 0.3, 0.5, 0.6, 0.85
"""The share of the time limit after which each phase ends: the untouched model's outputs, the
ranges, timing single layers, changing single layers, whole graphs. The rest is for training the
most promising points. The limit excludes the time for confirming and writing."""

LAST_SHARE = 0.5
"""The share of the remaining time that the last training takes."""

MIN_CONFIRMED, END_SHARE = 4, 0.35
"""Time is reserved to confirm `MIN_CONFIRMED` points, including the model as trained, but at most
`END_SHARE` of the time left; time for two points is always reserved."""

VERIFIED_INPUTS = 64
"""The number of the search's inputs on which the bundle is compared with PyTorch."""

EACH_SIDE = 4
"""The number of points tried on each side of the point where a path ends."""

TRIALS = 24
"""The largest number of neighbours to try as whole graphs for each path."""

INPUTS = 4
"""The number of different batches that the timed calls use in turn."""

QUICK = Protocol(rounds=5, warmup=2, round_s=0.02, inputs=INPUTS)
"""The protocol for one trial."""

CAREFUL = Protocol(rounds=7, warmup=3, round_s=0.1, inputs=INPUTS)
"""The protocol for the points to confirm."""

SHORT_MS, MORE_QUICK, MORE_CAREFUL = 5.0, 9, 15
"""Graphs faster than `SHORT_MS` are timed in more and shorter rounds: a machine may change its
speed within tenths of a second, so the median over many rounds is more reliable."""

SPIN_MS = 1.0
"""How long the runtime's threads spin after a call of a layer or a short graph. Calls take as long
as with the usual 35 ms, but the next case need not wait for the threads to stop spinning, which
would take four fifths of a short round."""


def protocol_for(ms: float, *, careful: bool = False) -> Protocol:
    """Returns the timing protocol for graphs of a model that takes `ms` as trained."""
    if ms >= SHORT_MS:
        return CAREFUL if careful else QUICK
    return replace(QUICK, rounds=MORE_CAREFUL if careful else MORE_QUICK)


def spin_for(ms: float) -> float | None:
    """Returns how long threads spin after a call of a graph that takes `ms`; None for the default.

    A long graph may use only one thread for longer than `SPIN_MS`; the others would go to sleep.
    """
    return SPIN_MS if ms < SHORT_MS else None


TRAINING_S, TRAINING_SHARE = 4.0, 0.15
"""The time for training one graph: these seconds, but at most this share of the remaining time."""


class Clock:
    """The time limit of a search; without `seconds` there is none.

    Steps cannot be interrupted, so a step starts only if the longest step of its kind so far would
    still end in time. `reserve` is the time for confirming and writing, of which writing takes
    `writing_s`. The clock starts at `started`, by default now.
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
        """The seconds until the end; negative after the end."""
        return self.seconds - (self._now() - self._started)

    def over(self, share: float = 1.0, step: str = "") -> bool:
        """Returns whether one more step of a kind would exceed a share of the search's time."""
        used = self.seconds - self.left if math.isfinite(self.seconds) else 0.0
        return used + self.longest.get(step, 0.0) > share * (self.seconds - self.reserve)

    def training_s(self, step: str, share: float = TRAINING_SHARE) -> float:
        """Returns how many seconds the training for one point may take."""
        seconds = max(TRAINING_S, self.longest.get(step, 0.0))
        return min(seconds, share * max(0.0, self.left - self.reserve))

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Measures the duration of the context as a step of a kind."""
        began = self._now()
        yield
        self.longest[kind] = max(self.longest.get(kind, 0.0), self._now() - began)


@dataclass(frozen=True, slots=True)
class FinishTimes:
    """The estimated time that the end of a search takes, in seconds: for each point, and once.

    Each point is written, opened and timed, then opened again to run on the confirming half.
    """

    timing_s: float
    confirming_s: float
    once_s: float

    def reserve_s(self, left_s: float) -> float:
        """Returns how much of the remaining time to reserve, for at most `MIN_CONFIRMED` points."""
        points = (END_SHARE * left_s - self.once_s) / (self.timing_s + self.confirming_s)
        count = min(MIN_CONFIRMED, max(2, math.floor(min(MIN_CONFIRMED, points))))
        return count * (self.timing_s + self.confirming_s) + self.once_s

    def points_within(self, left_s: float, *, timed: bool) -> float:
        """Returns how many points fit into the time; unless `timed`, they must be timed first."""
        point_s = self.confirming_s + (0.0 if timed else self.timing_s)
        return (left_s - self.once_s) / point_s
