"""Latencies: statistics, interleaving, and failures that do not spread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from moexport.common import timing
from moexport.common.latency import Latency, differs, summarise
from moexport.common.timing import Protocol, Round, TimedCall, measure
from moexport.errors import UsageError


def ticking(step_ns: int = 1_000_000) -> Callable[[], int]:
    """A clock that advances one step whenever it is read."""
    now = 0

    def read() -> int:
        nonlocal now
        now += step_ns
        return now

    return read


def test_statistics_are_over_every_call_and_clip_nothing() -> None:
    found = summarise([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 1.0, 1000.0]])
    assert found.n == 9
    assert found.median == 2.0
    assert (found.min, found.max) == (1.0, 1000.0)
    assert found.mean == pytest.approx(1020 / 9)
    assert found.rounds == (2.0, 4.0, 1.0)
    assert found.spread == pytest.approx(1.5)
    assert found.median <= found.p90 <= found.p95 <= found.p99 <= found.max


def test_every_round_times_each_input_equally_often() -> None:
    seen: list[int] = []
    measured = measure(
        {"a": seen.append}, Protocol(rounds=5, warmup=0, round_s=0.0, inputs=3), clock_ns=ticking()
    )
    assert measured.latencies["a"].n == 15
    # One untimed call opens each round.
    assert seen == [2, 0, 1, 2] * 5
    assert measured.latencies["a"].median == 1.0


def test_a_round_lasts_as_long_as_asked() -> None:
    measured = measure(
        {"a": lambda index: None}, Protocol(warmup=0, round_s=0.1), clock_ns=ticking(1_000_000)
    )
    # Three readings of the clock per call, one millisecond each.
    assert 33 <= measured.latencies["a"].n / 5 <= 35


def test_rounds_interleave_in_an_order_that_the_seed_decides() -> None:
    def order(seed: int) -> list[str]:
        seen: list[str] = []
        calls = {name: (lambda index, name=name: seen.append(name)) for name in "abcd"}
        measure(calls, Protocol(warmup=0, round_s=0.0, seed=seed), clock_ns=ticking())
        return seen[::2]

    first = order(1)
    assert first == order(1)
    assert first != order(2)
    rounds = [first[i : i + 4] for i in range(0, len(first), 4)]
    assert len(rounds) == 5
    assert all(sorted(each) == list("abcd") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


class Waiting(TimedCall):
    """Waits two milliseconds before it computes, and tells the processor's time as a device's."""

    def __init__(self) -> None:
        self.square = np.ones((40, 40))

    def __call__(self, index: int) -> object:
        time.sleep(0.002)
        return self.square @ self.square

    def device_ms(self, index: int) -> float:
        begun = time.thread_time_ns()
        self(index)
        return (time.thread_time_ns() - begun) / 1e6


class Spinning:
    """A clock of a process whose threads go on spinning for 60 ms when a call has ended."""

    def __init__(self) -> None:
        self.now = self.used = self.until = 0.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.used += min(seconds, max(0.0, self.until - self.now))
        self.now += seconds


def test_a_round_begins_when_the_threads_of_the_case_before_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, beside = Spinning(), list[bool]()
    monkeypatch.setattr(timing, "time", clock)

    def spins(index: int) -> None:
        del index
        clock.until = clock.now + 0.06

    def looks(index: int) -> None:
        del index
        beside.append(clock.now < clock.until)

    calls = {"spins": spins, "looks": looks}
    protocol = Protocol(warmup=0, round_s=0.0)
    measure(calls, protocol, clock_ns=lambda: int(1e9 * clock.now))
    assert len(beside) == 10 and not any(beside)
    # One that never sleeps is not waited for.
    clock.until = math.inf
    began = clock.now
    measure({"looks": looks}, protocol, clock_ns=lambda: int(1e9 * clock.now))
    assert clock.now - began == pytest.approx(5 * timing.MAX_WAIT_S, rel=0.1)


def test_what_threads_spin_is_in_the_processors_time() -> None:
    def spin() -> None:
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass

    before = time.process_time()
    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()
    assert time.process_time() - before > 0.06 - 1e-6


def test_a_device_that_tells_its_time_is_asked_as_often_in_the_same_rounds() -> None:
    kept: list[Round] = []
    done = [Round({"gpu": [3.0], "cpu": [1.0]}, {}, {"gpu": [0.5]})]
    measured = measure(
        {"gpu": Waiting(), "cpu": lambda index: None},
        Protocol(warmup=0, round_s=0.0, inputs=3),
        done=done,
        keep=kept.append,
    )
    assert set(measured.device) == {"gpu"}
    device, clock = measured.device["gpu"], measured.latencies["gpu"]
    assert device.n == clock.n == 1 + 4 * 3
    assert device.rounds[0] == 0.5
    assert all(set(each.device_ms) == {"gpu"} for each in kept)
    assert clock.min >= 2.0
    assert 0 < device.median < clock.median


@pytest.mark.parametrize("fails_at", [0, 4])
def test_a_contestant_that_fails_leaves_the_others_measured(fails_at: int) -> None:
    calls = 0

    def broken(index: int) -> None:
        nonlocal calls
        calls += 1
        if calls > fails_at:
            raise RuntimeError("out of memory")

    measured = measure({"bad": broken, "good": lambda index: None}, Protocol(round_s=0.0))
    assert set(measured.latencies) == {"good"}
    assert measured.failures["bad"] == "RuntimeError: out of memory"


def test_a_difference_below_the_spread_is_no_difference() -> None:
    def rounds(*medians: float) -> Latency:
        return summarise([[m] for m in medians])

    steady, noisy = rounds(1.0, 1.0, 1.01), rounds(0.9, 1.1, 1.3)
    assert not differs(steady, noisy)
    assert differs(steady, rounds(1.1, 1.1, 1.1))
    assert not differs(steady, steady)


@pytest.mark.parametrize("wrong", [{"rounds": 4}, {"warmup": -1}, {"inputs": 0}])
def test_a_protocol_that_cannot_be_meant_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Protocol(**wrong)
