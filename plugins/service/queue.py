"""Batches requests as inference servers do, in a bounded queue that instances read."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...errors import MoexportError, QueueFullError

X = TypeVar("X")
Y = TypeVar("Y")
Request_contra = TypeVar("Request_contra", contravariant=True)


class Submits(Protocol[Request_contra]):
    """Anything that accepts requests: a queue in this process, or a server."""

    def submit(self, request: Request_contra, *, wait: bool = False) -> Future[Any]:
        """Returns the future of the answer.

        Raises `QueueFullError` if the queue is full, unless it may `wait`.
        """
        ...


PROBE_S = 0.5
"""How long a queue is kept full to measure its rate."""


def requests_per_second(queue: Submits[int]) -> float:
    """Returns the rate at which requests are answered from a full queue."""
    answers, began = [], time.perf_counter()
    while time.perf_counter() - began < PROBE_S:
        answers.append(queue.submit(0, wait=True))
    for answer in answers:
        answer.result()
    return len(answers) / (time.perf_counter() - began)


class _Waiting(NamedTuple, Generic[X, Y]):
    """A waiting request, its time of arrival, and the future of its answer."""

    since: float
    request: X
    answer: Future[Y]


class Queue(Generic[X, Y]):
    """Batches requests for instances of a model, each of which has its own thread.

    An instance maps the requests of a batch to their answers. A free instance takes `max_batch`
    requests, oldest first, or fewer once the oldest has waited for `max_delay_s`; with 0 it does
    not wait, and batches grow with the load. While `capacity` requests are waiting, more are
    refused. When the context ends, accepted requests are answered and later ones are refused.
    """

    def __init__(
        self,
        instances: Sequence[Callable[[Sequence[X]], Iterable[Y]]],
        *,
        max_batch: int,
        capacity: int,
        max_delay_s: float = 0.0,
    ) -> None:
        self.max_batch, self.capacity, self.max_delay_s = max_batch, capacity, max_delay_s
        self._waiting: deque[_Waiting[X, Y]] = deque()
        self._closed = False
        lock = threading.Lock()
        self._arrived, self._left = threading.Condition(lock), threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._serve, args=(instance,), name=f"instance {index}")
            for index, instance in enumerate(instances)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: X, *, wait: bool = False) -> Future[Y]:
        """Returns the future of the answer, which may be the error of the request's batch.

        Raises `QueueFullError` at once if the queue is full, unless it may `wait` for room.
        """
        answer: Future[Y] = Future()
        with self._arrived:
            while wait and len(self._waiting) >= self.capacity and not self._closed:
                self._left.wait()
            if self._closed:
                raise MoexportError("the queue is closed and accepts no more requests")
            if len(self._waiting) >= self.capacity:
                raise QueueFullError(f"the queue is full: {self.capacity} requests are waiting")
            self._waiting.append(_Waiting(time.monotonic(), request, answer))
            self._arrived.notify()
        return answer

    def close(self) -> None:
        """Answers the accepted requests and ends the threads."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
            self._left.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Queue[X, Y]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self, instance: Callable[[Sequence[X]], Iterable[Y]]) -> None:
        """Computes batches until the queue is closed and empty."""
        while taken := self._batch():
            batch = [waiting for waiting in taken if waiting.answer.set_running_or_notify_cancel()]
            if not batch:
                continue
            try:
                results = instance([waiting.request for waiting in batch])
                answered = list(zip(batch, results, strict=True))
            except BaseException as error:  # noqa: BLE001  the waiting caller gets it
                for waiting in batch:
                    waiting.answer.set_exception(error)
            else:
                for waiting, y in answered:
                    waiting.answer.set_result(y)

    def _batch(self) -> list[_Waiting[X, Y]]:
        """Waits for the next batch; returns an empty one when the queue is closed and empty."""
        with self._arrived:
            while True:
                full = len(self._waiting) >= self.max_batch
                if not self._waiting:
                    if self._closed:
                        return []
                    self._arrived.wait()
                    continue
                delay = self._waiting[0].since + self.max_delay_s - time.monotonic()
                if not full and delay > 0 and not self._closed:
                    self._arrived.wait(delay)
                    continue
                count = min(self.max_batch, len(self._waiting))
                batch = [self._waiting.popleft() for _ in range(count)]
                if self._waiting:  # for another instance
                    self._arrived.notify()
                self._left.notify_all()
                return batch
