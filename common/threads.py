"""Chooses the number of threads for all timings: the one with which the model is fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Sets PyTorch's number of threads within the context."""
    import torch

    previous = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


PROBE_S, LONG_S = 0.04, 1.0
"""Each number of threads is timed twice, for `PROBE_S` of calls; a call over `LONG_S` runs once."""

TIME_SHARE = 0.95
"""More threads are used only if the time falls below this share of the time with fewer threads."""

MAX_SLOWDOWN = 4.0
"""Larger numbers of threads are not tried once the time is this many times the shortest."""


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of threads for all timings.

    `call_ms` is the time of one call of the unmodified model, by number of threads; it is empty if
    the number was given, or if there is only one core.
    """

    count: int
    call_ms: Mapping[int, float] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The number and the reason: `1 thread, with which … (0.75 ms a call with 1, …)`."""
        sentence = f"{self.count} thread{'' if self.count == 1 else 's'}"
        if not self.call_ms:
            return sentence
        listed = ", ".join(
            f"{_digits(ms)} ms{'' if index else ' a call'} with {count}"
            for index, (count, ms) in enumerate(self.call_ms.items())
        )
        return f"{sentence}, with which the untouched model is fastest ({listed})"


def _digits(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def fastest_threads(*calls: Callable[[], object]) -> Threads:
    """Returns the number of PyTorch threads (1, 2, 4 … all) with which calls are fastest.

    For several calls, such as one per batch size, the geometric mean of their times decides.
    """
    from statistics import median

    import torch

    available = torch.get_num_threads()
    if available == 1:
        return Threads(1)
    recorded: dict[int, list[list[float]]] = {}

    def time_calls(count: int) -> float:
        torch.set_num_threads(count)
        times = recorded.setdefault(count, [[] for _ in calls])
        for call, ms in zip(calls, times, strict=True):
            _time_calls(call, ms)
        return math.exp(sum(math.log(max(1e-6, median(ms))) for ms in times) / len(times))

    with with_threads(None):
        call_ms: dict[int, float] = {}
        for count in [
            *(1 << power for power in range(available.bit_length()) if 1 << power < available),
            available,
        ]:
            call_ms[count] = time_calls(count)
            if call_ms[count] > MAX_SLOWDOWN * min(call_ms.values()):
                break
        # Repeated in reverse order, so that a short disturbance does not decide.
        for count in reversed(call_ms):
            call_ms[count] = time_calls(count)
    fastest = min(call_ms.values())
    return Threads(next(n for n, ms in call_ms.items() if TIME_SHARE * ms <= fastest), call_ms)


def _time_calls(call: Callable[[], object], times_ms: list[float]) -> None:
    """Appends the times of repeated calls; the first call counts only if it is long."""
    end = math.inf
    # At least one call is timed, even if the process was suspended past `end`.
    while (time.perf_counter() < end or not times_ms) and max(times_ms, default=0.0) < 1e3 * LONG_S:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        if end < math.inf or now - start > LONG_S:
            times_ms.append(1e3 * (now - start))
        else:
            end = now + PROBE_S
