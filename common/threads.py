"""With how many threads everything is timed: those with which the untouched model is fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Sets PyTorch's thread count within the context."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PROBE_S, LONG_S = 0.04, 1.0
"""How long calls with one number of threads are looked at, twice; of longer calls one is enough."""

FEWER = 0.95
"""More threads must take less than this share of the time, or fewer are as good."""

FAR = 4.0
"""Where so many threads take so much longer than fewer, no more are tried."""


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of threads that everything is timed with.

    `call_ms` has the milliseconds of a call of the untouched model with each number that was tried:
    none where the number was given, or where there is only one.
    """

    count: int
    call_ms: Mapping[int, float] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The number and why: `1 thread; PyTorch: 0.75 ms a call with 1, 151 ms with 2`."""
        sentence = f"{self.count} thread{'' if self.count == 1 else 's'}"
        if not self.call_ms:
            return sentence
        listed = ", ".join(
            f"{_digits(ms)} ms{'' if place else ' a call'} with {count}"
            for place, (count, ms) in enumerate(self.call_ms.items())
        )
        return f"{sentence}, with which the untouched model is fastest ({listed})"


def _digits(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def fastest_threads(*calls: Callable[[], object]) -> Threads:
    """Returns with how many of PyTorch's threads calls are fastest: 1, 2, 4 … all of them.

    Of several calls, as of several batch sizes, it is the geometric mean that counts.
    """
    from statistics import median

    import torch

    most = torch.get_num_threads()
    if most == 1:
        return Threads(1)
    taken: dict[int, list[list[float]]] = {}

    def look(count: int) -> float:
        torch.set_num_threads(count)
        times = taken.setdefault(count, [[] for _ in calls])
        for call, ms in zip(calls, times, strict=True):
            _look(call, ms)
        return math.exp(sum(math.log(max(1e-6, median(ms))) for ms in times) / len(times))

    with with_threads(None):
        call_ms: dict[int, float] = {}
        for count in [
            *(1 << power for power in range(most.bit_length()) if 1 << power < most),
            most,
        ]:
            call_ms[count] = look(count)
            if call_ms[count] > FAR * min(call_ms.values()):
                break
        # Once more, the other way: a moment in which something else ran decides nothing.
        for count in reversed(call_ms):
            call_ms[count] = look(count)
    fastest = min(call_ms.values())
    return Threads(next(n for n, ms in call_ms.items() if FEWER * ms <= fastest), call_ms)


def _look(call: Callable[[], object], times_ms: list[float]) -> None:
    """Adds the milliseconds of some calls, of which the first is left out unless it is long."""
    end = math.inf
    while time.perf_counter() < end and max(times_ms, default=0.0) < 1e3 * LONG_S:
        began = time.perf_counter()
        call()
        now = time.perf_counter()
        if end < math.inf or now - began > LONG_S:
            times_ms.append(1e3 * (now - began))
        else:
            end = now + PROBE_S
