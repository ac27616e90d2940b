"""The queue of a service: order, batches, refusals, errors, and shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait

import pytest
from moexport.errors import MoexportError, QueueFullError
from moexport.plugins.service.queue import Queue


class Squares:
    """An instance that can be blocked, and that records its batches."""

    def __init__(self, *, held: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.began, self.go = threading.Event(), threading.Event()
        if not held:
            self.go.set()

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.batches.append(list(numbers))
        self.began.set()
        assert self.go.wait(30)
        if 1300 in numbers:
            raise MemoryError("no room for 1300")
        return [number**2 for number in numbers]


def busy(queue: Queue[int, int], instance: Squares) -> None:
    """Makes the only instance begin a batch, so that later requests wait."""
    queue.submit(0)
    assert instance.began.wait(30)


def test_each_request_gets_its_own_answer() -> None:
    with Queue([Squares(), Squares()], max_batch=4, capacity=100) as queue:
        answers = [queue.submit(number) for number in range(100)]
        assert [each.result(30) for each in answers] == [number**2 for number in range(100)]


def test_waiting_requests_are_batched_oldest_first_up_to_the_largest_batch() -> None:
    instance = Squares(held=True)
    with Queue([instance], max_batch=3, capacity=100) as queue:
        busy(queue, instance)
        answers = [queue.submit(number) for number in range(1, 8)]
        instance.go.set()
        wait(answers, 30)
    assert instance.batches == [[0], [1, 2, 3], [4, 5, 6], [7]]


def test_a_full_queue_refuses_at_once_loses_nothing_and_recovers() -> None:
    instance = Squares(held=True)
    with Queue([instance], max_batch=2, capacity=3) as queue:
        busy(queue, instance)
        accepted = [queue.submit(number) for number in (1, 2, 3)]
        for _ in range(5):
            with pytest.raises(QueueFullError, match="the queue is full: 3 requests are waiting"):
                queue.submit(4)
        instance.go.set()
        assert [each.result(30) for each in accepted] == [1, 4, 9]
        assert queue.submit(5).result(30) == 25


def test_a_request_that_waits_for_room_is_not_refused() -> None:
    with Queue([Squares()], max_batch=2, capacity=1) as queue:
        answers = [queue.submit(number, wait=True) for number in range(50)]
        assert [each.result(30) for each in answers] == [number**2 for number in range(50)]


def test_a_batch_that_is_not_full_waits_for_the_delay_and_no_longer() -> None:
    instance = Squares()
    with Queue([instance], max_batch=4, capacity=100, max_delay_s=0.2) as queue:
        began = time.monotonic()
        assert queue.submit(2).result(30) == 4
        assert time.monotonic() - began >= 0.2
    with Queue([instance], max_batch=4, capacity=100, max_delay_s=3600) as queue:
        answers = [queue.submit(number) for number in range(4)]  # full: there is no delay
        assert [each.result(30) for each in answers] == [0, 1, 4, 9]
    assert instance.batches == [[2], [0, 1, 2, 3]]


def test_an_error_reaches_the_requests_of_its_batch_and_no_others() -> None:
    instance = Squares(held=True)
    with Queue([instance], max_batch=2, capacity=100) as queue:
        busy(queue, instance)
        answers = [queue.submit(number) for number in (11, 12, 1300, 14, 15, 16)]
        instance.go.set()
        wait(answers, 30)
        errors = [each.exception() for each in answers]
        assert [type(each) for each in errors] == [
            *(type(None), type(None), MemoryError, MemoryError, type(None), type(None))
        ]
        assert queue.submit(3).result(30) == 9


def test_too_few_answers_are_an_error_and_not_another_requests_answer() -> None:
    with Queue([lambda numbers: [1]], max_batch=2, capacity=9, max_delay_s=3600) as queue:
        both = [queue.submit(0), queue.submit(0)]
        for each in both:
            with pytest.raises(ValueError, match="shorter"):
                each.result(30)


def test_a_cancelled_request_is_not_computed() -> None:
    instance = Squares(held=True)
    with Queue([instance], max_batch=2, capacity=9) as queue:
        busy(queue, instance)
        first, second = queue.submit(1), queue.submit(2)
        assert first.cancel()
        instance.go.set()
        assert second.result(30) == 4
    assert instance.batches == [[0], [2]]


def test_closing_answers_accepted_requests_and_refuses_later_ones() -> None:
    before = threading.enumerate()  # other threads may end at any time
    instance = Squares()
    with Queue([instance], max_batch=4, capacity=100, max_delay_s=3600) as queue:
        answers = [queue.submit(number) for number in range(3)]
    assert [each.result(0) for each in answers] == [0, 1, 4]
    with pytest.raises(MoexportError, match="the queue is closed"):
        queue.submit(1)
    assert [each for each in threading.enumerate() if each not in before] == []
