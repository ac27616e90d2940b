"""Calls a model on a running Triton server with NVIDIA's client, as the system under test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...common.libraries import library
from ...errors import EngineError, MoexportError, QueueFullError, UsageError, install
from ...exporter.inputs import Inputs
from ...graphs.names import K_INPUT
from .findings import Layout
from .queue import requests_per_second

READY_S = 10.0
"""How long to wait for a server's description of its model."""


def triton_client() -> Any:
    """Returns NVIDIA's client module; raises `MissingExtraError` if it is not installed."""
    return library("tritonclient.grpc", "--triton needs NVIDIA's client", install("triton"))


@dataclass(frozen=True, slots=True)
class TritonModel:
    """A running server's address, with its gRPC port, and a model: `127.0.0.1:8001/vit`."""

    address: str
    name: str

    @staticmethod
    def parse(text: str) -> TritonModel:
        """Parses `ADDRESS/MODEL`; raises `UsageError` if that is not its form."""
        address, _, name = text.partition("/")
        if not name or not address.rpartition(":")[2].isdecimal():
            raise UsageError(
                f"--triton {text}: expected the form ADDRESS/MODEL",
                hint="give the server's gRPC port and the model: --triton 127.0.0.1:8001/vit",
            )
        return TritonModel(address, name)


class TritonService:
    """A server's model as the service under test; the server forms the batches.

    `contact` raises `EngineError` if the server does not answer or has no such model.
    """

    def __init__(self, model: TritonModel, samples: Inputs, max_open: int) -> None:
        self._module, self._model, self._samples = triton_client(), model, samples
        self._max_open = max_open
        self._inputs: list[str] = []

    def contact(self) -> int:
        """Returns the number of instances of the model on the server."""
        model = self._model
        try:
            with self._client() as client:
                metadata = client.get_model_metadata(model.name, client_timeout=READY_S)
                config = client.get_model_config(model.name, client_timeout=READY_S).config
        except Exception as error:
            raise EngineError(
                f"--triton {model.address}/{model.name}: {error}",
                hint="docs/deploy.md shows how to start the server; give its gRPC port",
            ) from error
        self._inputs = [spec.name for spec in metadata.inputs if spec.name != K_INPUT]
        return sum(group.count for group in config.instance_group) or 1

    def try_layouts(self, layouts: Sequence[tuple[int, int]]) -> tuple[Layout, ...]:
        """Returns the layout that the server is configured with, and its measured rate."""
        del layouts
        layout = Layout(instances=self.contact(), threads=0, per_s=0.0)
        with self.queue(layout, self._max_open, 0.0) as queue:
            return (replace(layout, per_s=requests_per_second(queue)),)

    @contextmanager
    def queue(self, layout: Layout, capacity: int, max_delay_s: float) -> Iterator[TritonQueue]:
        """Yields a queue with at most `capacity` unanswered requests at the server."""
        del layout, max_delay_s
        with self._client() as client:
            yield TritonQueue(self._module, client, self._model.name, self._requests(), capacity)

    def close(self) -> None:
        """Does nothing: each queue closes its own client."""

    def _client(self) -> Any:
        return self._module.InferenceServerClient(self._model.address)

    def _requests(self) -> list[list[Any]]:
        """Creates the requests of all samples once, before anything is timed."""
        from tritonclient.utils import np_to_triton_dtype

        samples = self._samples if isinstance(self._samples, dict) else None
        arrays = samples or {self._inputs[0]: self._samples}
        count = len(next(iter(arrays.values())))
        requests = []
        for row in range(count):
            request = []
            for name, array in arrays.items():
                sample = array[row : row + 1]
                request.append(
                    self._module.InferInput(name, [*sample.shape], np_to_triton_dtype(sample.dtype))
                )
                request[-1].set_data_from_numpy(sample)
            requests.append(request)
        return requests


class TritonQueue:
    """Sends requests to a server, with at most `capacity` of them unanswered.

    More requests are refused at once, as in `Queue`.
    """

    def __init__(
        self, module: Any, client: Any, model: str, requests: Sequence[list[Any]], capacity: int
    ) -> None:
        self._module, self._client, self._model = module, client, model
        self._requests, self._capacity = requests, capacity
        self._open, self._answered = 0, threading.Condition()

    def submit(self, request: int, *, wait: bool = False) -> Future[Any]:
        """Returns the future of the answer, which may be the server's error.

        Raises `QueueFullError` if too many are unanswered, unless it may `wait`.
        """
        with self._answered:
            while wait and self._open >= self._capacity:
                self._answered.wait()
            if self._open >= self._capacity:
                raise QueueFullError(f"the server is full: {self._capacity} requests are pending")
            self._open += 1
        answer: Future[Any] = Future()

        def done(result: Any, error: Any) -> None:
            with self._answered:
                self._open -= 1
                self._answered.notify()
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(MoexportError(f"Triton's model {self._model}: {error}"))

        self._client.async_infer(self._model, self._requests[request], done)
        return answer
