"""Measures latency: cases are timed in turn, in random order, and no outliers are removed.

Cases are interleaved: each runs once per round, in a new random order, so a machine that slows down
for a second slows all of them. The spread between a case's rounds shows which differences the run
can resolve.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UsageError, one_line
from .console import Progress, Silent
from .latency import Latency, summarise

NS_PER_MS = 1e6
MIN_ROUNDS = 5

SAMPLE_S, MAX_WAIT_S, IDLE_SHARE = 0.01, 0.25, 0.2
"""The idle test: the sampling time, the longest wait, and the largest share of one core that an
idle process may use. Systems account for running threads only every 4 ms or so."""

WAIT_S = 0.05
"""The usual wait after a call of ONNX Runtime."""

IndexedCall = Callable[[int], object]
"""A call to time; the argument selects the input (0, 1, …, in turn)."""


class TimedCall:
    """A call with properties that a plain function lacks.

    `inputs` is the call's number of inputs, if it differs from the protocol's; a call that
    `reopens` its model is warmed up in every round.
    """

    inputs: int | None = None
    reopens: bool = False

    def __init__(self, call: IndexedCall) -> None:
        self._timed = call

    def __call__(self, index: int) -> object:
        return self._timed(index)

    def device_ms(self, index: int) -> float | None:
        """Makes the call; returns its time on the device in ms, or None if that is unknown."""
        return None

    def rest(self) -> None:
        """Called when the call's part of a round has ended."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How long and in what order to measure.

    `warmup` untimed calls come first, and one more before each round, which begins once the threads
    of the previous case sleep. A round passes over all `inputs` until `round_s` seconds are over,
    so every case is timed on the same mix of inputs.
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
    """The times of all calls in one round in ms, or the failure that ended it.

    `ms` is measured by the wall clock, `device_ms` by the device, for cases that report it.
    """

    ms: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    device_ms: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a measurement: a latency or a failure per case.

    `device` has the times on the device, for cases that report them.
    """

    latencies: dict[str, Latency]
    failures: dict[str, str]
    device: dict[str, Latency] = field(default_factory=dict)


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

    A case that raises is dropped, and its message is kept in `failures`. `done` has the rounds of
    an interrupted run, which count as well; each new round is passed to `keep`. Each timed pass of
    a `TimedCall` is followed by an untimed one that asks for the times on the device.
    """
    progress = progress or Silent()
    calls = {n: c if isinstance(c, TimedCall) else TimedCall(c) for n, c in cases.items()}
    rounds = list(done)
    failures = {name: text for round_ in done for name, text in round_.failures.items()}
    left = protocol.rounds - len(rounds)
    progress.step(f"{title}: {left} rounds of {len(cases)} cases", total=left * len(cases))
    warm: set[str] = set()
    for number in range(len(rounds), protocol.rounds):
        current = Round()
        for name in _order(cases, protocol.seed, number):
            if name not in failures:
                try:
                    call = calls[name]
                    _wait_until_idle()
                    if name not in warm or call.reopens:
                        for index in range(protocol.warmup):
                            call(index)
                    warm.add(name)
                    current.ms[name], device_ms = _round_ms(call, protocol, clock_ns)
                    if device_ms:
                        current.device_ms[name] = device_ms
                    call.rest()
                except Exception as error:  # noqa: BLE001  a case may fail in any way
                    current.failures[name] = failures[name] = one_line(error)
            progress.advance(1)
        rounds.append(current)
        keep(current)
    latencies = {
        name: summarise([round_.ms[name] for round_ in rounds])
        for name in cases
        if name not in failures
    }
    device = {
        name: [round_.device_ms[name] for round_ in rounds if name in round_.device_ms]
        for name in latencies
    }
    return Measured(
        latencies=latencies,
        failures=failures,
        device={name: summarise(ms) for name, ms in device.items() if ms},
    )


def _order(cases: Mapping[str, IndexedCall], seed: int, number: int) -> list[str]:
    """Returns the order in a round: random, and independent of earlier rounds."""
    names = list(cases)
    random.Random(f"{seed}, {number}").shuffle(names)
    return names


def _wait_until_idle() -> None:
    """Waits until no thread of this process runs, or for `MAX_WAIT_S`.

    A runtime's threads spin after a call (ONNX Runtime's for about 35 ms) and would take cores from
    the next case.
    """
    end = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < end:
        start, used = time.monotonic(), time.process_time()
        time.sleep(SAMPLE_S)
        if time.process_time() - used <= IDLE_SHARE * (time.monotonic() - start):
            return


def _round_ms(
    call: TimedCall, protocol: Protocol, clock_ns: Callable[[], int]
) -> tuple[list[float], list[float]]:
    """Times whole passes over the inputs; returns ms per call, and ms on the device."""
    inputs = call.inputs or protocol.inputs
    # Loads the weights back into the caches, which the previous case has filled.
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
