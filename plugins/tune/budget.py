"""The time of a search: what is left of it, how long its steps take, and what its end will take.

A step begins only where it fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...common.timing import LOOK_S, WAIT_S, Protocol

TRIAL, RUN, OPEN, WAYS = "trial", "run", "open", "ways"
"""Steps of a search: a whole graph, in it the run over the search's half, and writing and opening;
a graph with other lowerings."""

TRACE, EFFECT = "trace", "effect"
"""Steps: tracing a model, and one choice of one layer."""


UNTOUCHED_SHARE, RANGES_SHARE, TIMES_SHARE, EFFECTS_SHARE, TRIALS_SHARE = 0.1, 0.3, 0.5, 0.6, 0.85
"""Of a search's time, when what comes before has ended: the untouched model's outputs, the ranges,
the times of single layers, what they do when they are changed, and whole graphs. The rest is for
the training of what promises most. What it takes to confirm the answer and to write it is not
among them."""

LAST_SHARE = 0.5
"""What a last training takes of the time that is left."""

FEWEST, END_SHARE = 4, 0.35
"""Points for whose confirmation time is kept, the model as trained among them, and the share of a
search's time that it may take; two points have theirs in any case."""

VERIFIED = 64
"""Inputs of the search's half that the bundle is compared with PyTorch on, layer by layer."""


EACH_SIDE = 4
"""Points of a path that are looked at before where it must end, and after."""

TRIALS = 24
"""Whole graphs beside the path, at the most, for each width of integers."""

INPUTS = 4
"""So many batches are timed in turn."""

QUICK = Protocol(rounds=5, warmup=2, round_s=0.02, inputs=INPUTS)
"""Of a look at one graph."""

CAREFUL = Protocol(rounds=7, warmup=3, round_s=0.1, inputs=INPUTS)
"""Of the graphs of the front, which take turns."""

SHORT_MS, MORE_QUICK, MORE_CAREFUL = 5.0, 9, 15
"""Graphs that take less are timed in so many rounds, as short as the quick ones: a machine may
change its speed within tenths of a second, and then the median over many rounds tells more."""

SPIN_MS = 1.0
"""So long the runtime's threads spin after a call of a layer or of a short graph. Such calls take
as long as with the 35 ms that are usual, and the next case need not wait for the threads to rest:
four fifths of what a short round would take."""


def protocol_for(ms: float, *, careful: bool = False) -> Protocol:
    """Returns how graphs are timed that take about as long as the one of the model as trained."""
    if ms >= SHORT_MS:
        return CAREFUL if careful else QUICK
    return replace(QUICK, rounds=MORE_CAREFUL if careful else MORE_QUICK)


def spin_for(ms: float) -> float | None:
    """Returns how long threads spin between calls of such graphs, in milliseconds (None: usual).

    Of longer ones parts may run on one thread for longer than that: the others would fall asleep.
    """
    return SPIN_MS if ms < SHORT_MS else None


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


@dataclass(frozen=True, slots=True)
class End:
    """About how long the end of a search takes, in seconds: for each point, and once.

    Each is written, opened and timed, then opened again to run over the confirming half.
    """

    timing_s: float
    confirming_s: float
    once_s: float

    def reserve_s(self, left_s: float) -> float:
        """What to keep of the time that is left: for the `FEWEST` points, or for fewer."""
        points = (END_SHARE * left_s - self.once_s) / (self.timing_s + self.confirming_s)
        count = min(FEWEST, max(2, math.floor(min(FEWEST, points))))
        return count * (self.timing_s + self.confirming_s) + self.once_s

    @staticmethod
    def of(
        clock: Clock, base_ms: float, *, one_s: float, searching: int, confirming: int, routed: bool
    ) -> End:
        """Returns what the end takes after the steps that a clock has seen.

        `base_ms` is the latency of the model as trained, `one_s` what the untouched model takes for
        an input; `routed` models are traced again for their k.
        """
        longest, one = clock.longest, base_ms / 1e3
        # A resumed search did not run it again: the untouched model is hardly faster.
        run_s = longest.get(RUN, one_s * searching) / searching
        open_s, ways_s = longest.get(OPEN, 0.0), longest.get(WAYS, 0.0)
        careful = protocol_for(base_ms, careful=True)
        calls = careful.warmup + careful.rounds * (1 + careful.inputs)
        timed_s = max(careful.rounds * (careful.round_s + one), calls * one)
        untouched_s = timed_s + careful.rounds * WAIT_S
        timed_s += careful.rounds * (WAIT_S if spin_for(base_ms) is None else LOOK_S)
        once_s = untouched_s + confirming * one_s + open_s + VERIFIED * (2 * one_s + run_s)
        if routed:
            once_s += 2 * longest[TRACE]  # to find where k is, and of the k that was found
        return End(
            timing_s=open_s + timed_s + ways_s,
            confirming_s=open_s + confirming * run_s,
            once_s=once_s - ways_s,  # those of the model as trained are known
        )

    def points_within(self, left_s: float, *, timed: bool) -> float:
        """Returns how many points there is time for, which are timed before unless they were."""
        each_s = self.confirming_s + (0.0 if timed else self.timing_s)
        return (left_s - self.once_s) / each_s
