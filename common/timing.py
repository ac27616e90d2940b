"""How long calls take: cases measured in turn, in random order, nothing clipped.

What is compared is interleaved: in every round each case runs once, in an order drawn anew,
so that a machine that slows down for a second slows all of them. The spread between a case's
rounds is the yardstick of what the run can tell apart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import UsageError, in_one_line
from .console import Progress, Silent
from .environment import energy_counters

NS_PER_MS = 1e6
MIN_ROUNDS = 5

LOOK_S, LONGEST_S, IDLE = 0.01, 0.25, 0.2
"""How long the process is looked at before it counts as idle, how long at most that is waited for,
and the share of one core that an idle one may take. Systems count a thread that is running only
every 4 ms or so."""

WAIT_S = 0.05
"""How long it is after a call of ONNX Runtime."""

IndexedCall = Callable[[int], object]
"""One call to be timed; its argument says which of the inputs to use (0, 1, …, taken in turn)."""


class TimedCall:
    """A call that says more of itself than a plain function does.

    `inputs` are what it takes in turn, where that is not the protocol's number; one that `reopens`
    is warmed up in every round.
    """

    inputs: int | None = None
    reopens: bool = False

    def __call__(self, index: int) -> object:
        """Makes the call."""
        raise NotImplementedError

    def device_ms(self, index: int) -> float | None:
        """Makes the call; returns the milliseconds that its device took, None if nobody tells."""
        del index
        return None

    def rest(self) -> None:
        """Told when the call's part of a round is over."""


class _Plain(TimedCall):
    def __init__(self, call: IndexedCall) -> None:
        self._call = call

    def __call__(self, index: int) -> object:
        return self._call(index)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of single calls, over all rounds together.

    `n` calls were timed. `rounds` holds the median of each round and `spread` their relative range,
    (max − min) / median: two latencies that differ by less are not told apart. `counts` are of the
    calls in equal factors of time from `min` to `max`.
    """

    median: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    mean: float
    std: float
    n: int
    rounds: tuple[float, ...]
    spread: float
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Protocol:
    """How long and in what order to measure.

    `warmup` calls come first, untimed, and one more before each round, which begins once the
    threads of the case before sleep. A round goes over the `inputs` distinct inputs a whole number
    of times, until `round_s` seconds have passed: every case is timed on the same mix of inputs.
    """

    rounds: int = MIN_ROUNDS
    warmup: int = 3
    round_s: float = 0.2
    inputs: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < MIN_ROUNDS:
            raise UsageError(
                f"{self.rounds} rounds are too few to tell a difference from noise",
                hint=f"use at least {MIN_ROUNDS}",
            )
        if self.warmup < 0 or self.round_s < 0 or self.inputs < 1:
            raise UsageError(
                f"warmup={self.warmup}, round_s={self.round_s}, inputs={self.inputs}: "
                "the first two cannot be negative, and at least one input is needed"
            )


@dataclass(frozen=True, slots=True)
class Round:
    """What one round found: milliseconds of every call, or in words what ended it.

    `ms` are by the wall clock; `device_ms` those of the device, for cases that tell them. `joules`
    are of a call, where the machine tells them.
    """

    ms: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    device_ms: dict[str, list[float]] = field(default_factory=dict)
    joules: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a measurement: a latency or in words what ended it, per case.

    `device` is the time on the device, of cases that tell it, and `joules` the energy of a call.
    """

    latencies: dict[str, Latency]
    failures: dict[str, str]
    device: dict[str, Latency] = field(default_factory=dict)
    joules: dict[str, float] = field(default_factory=dict)


def measure(
    cases: Mapping[str, IndexedCall],
    protocol: Protocol,
    *,
    title: str = "timing",
    progress: Progress | None = None,
    done: Sequence[Round] = (),
    keep: Callable[[Round], None] = lambda _: None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Measured:
    """Returns the latency of each case, measured in interleaved rounds.

    A case that raises is left out from then on, and what it said kept in `failures`. Rounds
    that an interrupted run has `done` count; each new one is handed to `keep`. A `TimedCall` that
    tells its device's time is called for that, too, as often and in turn with the timed passes.
    """
    progress = progress or Silent()
    calls = {n: c if isinstance(c, TimedCall) else _Plain(c) for n, c in cases.items()}
    rounds = list(done)
    failures = {name: text for turn in done for name, text in turn.failures.items()}
    left = protocol.rounds - len(rounds)
    progress.step(f"{title}: {left} rounds, {len(cases)} in turn", total=left * len(cases))
    warm: set[str] = set()
    counters, _ = energy_counters()
    for number in range(len(rounds), protocol.rounds):
        current = Round()
        for name in _order(cases, protocol.seed, number):
            if name not in failures:
                try:
                    call = calls[name]
                    _wait_until_idle()
                    if name not in warm or call.reopens:
                        _warm_up(call, protocol.warmup)
                    warm.add(name)
                    if counters is not None:
                        counters.joules()
                    ms, device_ms = _round_ms(call, protocol, clock_ns)
                    if counters is not None:  # one call more, which warms the caches
                        current.joules[name] = counters.joules() / (1 + len(ms) + len(device_ms))
                    current.ms[name] = ms
                    if device_ms:
                        current.device_ms[name] = device_ms
                    call.rest()
                except Exception as error:  # noqa: BLE001  it may fail in any way it likes
                    current.failures[name] = failures[name] = in_one_line(error)
            progress.advance(1)
        rounds.append(current)
        keep(current)
    latencies = {
        name: summarise([turn.ms[name] for turn in rounds])
        for name in cases
        if name not in failures
    }
    device = {
        name: [turn.device_ms[name] for turn in rounds if name in turn.device_ms]
        for name in latencies
    }
    return Measured(
        latencies=latencies,
        failures=failures,
        device={name: summarise(ms) for name, ms in device.items() if ms},
        joules={
            name: float(np.median([turn.joules[name] for turn in rounds]))
            for name in latencies
            if all(name in turn.joules for turn in rounds)
        },
    )


def _order(cases: Mapping[str, IndexedCall], seed: int, number: int) -> list[str]:
    """A round's order: drawn anew for each, the same however many rounds were run before."""
    names = list(cases)
    random.Random(f"{seed}, {number}").shuffle(names)
    return names


def _wait_until_idle() -> None:
    """Waits until no thread of this process runs.

    The threads of a runtime go on spinning when a call has ended, those of ONNX Runtime for about
    35 ms: they would take the cores of the case that comes next.
    """
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        began, used = time.monotonic(), time.process_time()
        time.sleep(LOOK_S)
        if time.process_time() - used <= IDLE * (time.monotonic() - began):
            return


def _warm_up(call: TimedCall, calls: int) -> None:
    for index in range(calls):
        call(index)


def _round_ms(
    call: TimedCall, protocol: Protocol, clock_ns: Callable[[], int]
) -> tuple[list[float], list[float]]:
    """Times whole passes over the inputs; returns milliseconds per call, and the device's."""
    # Brings the weights back into the caches, which the case before has filled with its own.
    inputs = call.inputs or protocol.inputs
    call(inputs - 1)
    times_ms: list[float] = []
    device_ms: list[float] = []
    deadline_ns = clock_ns() + protocol.round_s * 1e9
    while not times_ms or clock_ns() < deadline_ns:
        for index in range(inputs):
            start_ns = clock_ns()
            call(index)
            times_ms.append((clock_ns() - start_ns) / NS_PER_MS)
        device_times = (call.device_ms(index) for index in range(inputs))
        device_ms += [ms for ms in device_times if ms is not None]
    return times_ms, device_ms


def summarise(rounds_ms: list[list[float]]) -> Latency:
    """Returns the statistics of the calls of several rounds; every call counts."""
    calls = np.concatenate([np.asarray(r, np.float64) for r in rounds_ms])
    medians = [float(np.median(r)) for r in rounds_ms]
    p50, p90, p95, p99 = (float(p) for p in np.percentile(calls, [50, 90, 95, 99]))
    middle = float(np.median(medians))
    return Latency(
        median=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        min=float(calls.min()),
        max=float(calls.max()),
        mean=float(calls.mean()),
        std=float(calls.std(ddof=1)) if calls.size > 1 else 0.0,
        n=int(calls.size),
        rounds=tuple(medians),
        spread=(max(medians) - min(medians)) / middle if middle > 0 else 0.0,
        counts=_counts(calls),
    )


BINS = 24


def _counts(calls: np.ndarray) -> tuple[int, ...]:
    """How many calls took how long, in equal factors; none where all took as long, or no time."""
    if calls.min() <= 0 or calls.min() == calls.max():
        return ()
    logs = np.log(calls)
    return tuple(np.histogram(logs, BINS, (logs.min(), logs.max()))[0].tolist())


def differs(a: Latency, b: Latency) -> bool:
    """Whether two medians are further apart than the rounds of either: below it, no difference."""
    smaller = min(a.median, b.median)
    if smaller <= 0:
        return a.median != b.median
    return abs(a.median - b.median) / smaller > max(a.spread, b.spread)
