"""The number of threads that everything is timed with is found, not assumed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from moexport.common import threads
from moexport.common.threads import Threads, fastest_threads, with_threads

Taking = Callable[[Callable[[int], float]], Callable[[], None]]


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Taking:
    """Makes calls whose time depends on PyTorch's number of threads, by a clock of their own."""
    now = 0.0

    def call(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: now))
    return lambda seconds: lambda: call(seconds(torch.get_num_threads()))


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        (lambda threads: 20e-3 * threads, 1),
        (lambda threads: 10e-3 if threads == 2 else 60e-3, 2),
        (lambda threads: 20e-3 if threads == 6 else 60e-3, 6),
    ],
    ids=["small", "medium", "large"],
)
def test_the_number_is_that_with_which_calls_are_fastest(
    seconds: Callable[[int], float], count: int, taking: Taking
) -> None:
    with with_threads(6):
        found = fastest_threads(taking(seconds))
        assert torch.get_num_threads() == 6
    assert found.count == count
    assert {1, 2} <= found.call_ms.keys() <= {1, 2, 4, 6}


def test_of_several_sizes_each_counts_as_much(taking: Taking) -> None:
    small = taking(lambda threads: 5e-3 * threads**2)
    large = taking(lambda threads: 100e-3 / threads)
    with with_threads(4):
        assert fastest_threads(large).count == 4
        assert fastest_threads(small, large).count == 1


def test_where_many_threads_are_far_slower_no_more_are_tried(taking: Taking) -> None:
    with with_threads(16):
        found = fastest_threads(taking(lambda threads: 1e-3 if threads == 1 else 60e-3))
    assert found.count == 1
    assert [*found.call_ms] == [1, 2]
    assert found.sentence == (
        "1 thread, with which the untouched model is fastest (1 ms a call with 1, 60 ms with 2)"
    )


def test_with_one_thread_there_is_nothing_to_try(taking: Taking) -> None:
    with with_threads(1):
        assert fastest_threads(taking(lambda _: 10.0)) == Threads(1)
    assert Threads(1).sentence == "1 thread"
    assert Threads(1, {1: 1.283, 2: 1240.4}).sentence.endswith(
        "(1.28 ms a call with 1, 1,240 ms with 2)"
    )


def test_a_call_is_timed_even_if_the_process_does_not_run_for_as_long_as_it_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "PROBE_S", 0.0)
    with with_threads(2):
        call_ms = fastest_threads(lambda: sum(range(1000))).call_ms
    assert [*call_ms] == [1, 2] and min(call_ms.values()) > 0
