"""Runs a bundle in Triton's Python backend, without PyTorch; a version's `model.py` is a copy.

Triton's Python needs moexport and what requirements-run.txt lists. Requests with the same k, inputs
and shapes run as one batch. If a bundle refuses a request for its k or shape, only that one fails.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import moexport
import numpy as np
from moexport.errors import FeedError, MoexportError

triton: Any = importlib.import_module("triton_python_backend_utils")  # Triton's own


class TritonPythonModel:
    """The class by the name that Triton expects."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the bundle of a version."""
        config = json.loads(args["model_config"])
        parameters = {key: item["string_value"] for key, item in config["parameters"].items()}
        threads = int(parameters["threads"]) if "threads" in parameters else None
        folder = Path(args["model_repository"]) / args["model_version"] / "bundle"
        self._session = moexport.Bundle.open(folder).session(
            runtime=parameters["runtime"], provider=parameters["provider"], threads=threads
        )
        self._k = int(parameters["k"]) if "k" in parameters else None
        self._inputs = [port["name"] for port in config["input"] if port["name"] != "k"]
        self._outputs = [port["name"] for port in config["output"]]
        # A server built for NumPy 1, such as 2.51, silently misreads arrays of NumPy 2, which the
        # first request reveals. DLPack always transfers the right values.
        self._numpy_works: bool | None = None

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Returns the responses in the order of the requests."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[Any, list[tuple[int, dict[str, np.ndarray]]]] = {}
        for index, request in enumerate(requests):
            try:
                arrays, k = self._inputs_and_k(request)
            except MoexportError as error:
                responses[index] = _error_response(error)
                continue
            shapes = tuple((name, x.shape[1:]) for name, x in arrays.items())
            groups.setdefault((k, shapes), []).append((index, arrays))
        for (k, _), group in groups.items():
            for (index, _), response in zip(group, self._run_together(group, k), strict=True):
                responses[index] = response
        return responses

    def _inputs_and_k(self, request: Any) -> tuple[dict[str, np.ndarray], int | None]:
        """Returns a request's inputs and k, with defaults for omitted ones."""
        tensors = ((n, triton.get_input_tensor_by_name(request, n)) for n in self._inputs)
        arrays = {name: self._array(tensor) for name, tensor in tensors if tensor is not None}
        tensor = None if self._k is None else triton.get_input_tensor_by_name(request, "k")
        if tensor is None:
            return arrays, self._k
        ks = {int(value) for value in self._array(tensor).ravel()}
        if len(ks) != 1:
            raise FeedError(
                f"the request has several values of k: {', '.join(map(str, sorted(ks)))}",
                hint="send a separate request for each k",
            )
        return arrays, ks.pop()

    def _run_together(
        self, group: Sequence[tuple[int, dict[str, np.ndarray]]], k: int | None
    ) -> list[Any]:
        """Runs requests as one batch, or one by one if the bundle refuses the batch."""
        batches = [arrays for _, arrays in group]
        inputs = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        try:
            values = self._session.run(inputs, k, self._outputs)
        except MoexportError as error:
            if len(group) == 1:
                return [_error_response(error)]
            return [answer for request in group for answer in self._run_together([request], k)]
        ends = np.cumsum([len(next(iter(batch.values()))) for batch in batches])[:-1]
        split = {name: np.split(value, ends) for name, value in values.items()}
        return [
            triton.InferenceResponse([self._tensor(name, part[i]) for name, part in split.items()])
            for i in range(len(group))
        ]

    def _array(self, tensor: Any) -> np.ndarray:
        array = np.from_dlpack(tensor)
        if self._numpy_works is None:
            copied = tensor.as_numpy()
            same = copied.strides == array.strides and np.array_equal(copied, array)
            self._numpy_works = bool(same)
        return array

    def _tensor(self, name: str, array: np.ndarray) -> Any:
        if self._numpy_works:
            return triton.Tensor(name, array)
        with contextlib.redirect_stderr(None):  # hides a harmless warning about a capsule's name
            return triton.Tensor.from_dlpack(name, array)


def _error_response(error: MoexportError) -> Any:
    hint = f"; {error.hint}" if error.hint else ""
    return triton.InferenceResponse(error=triton.TritonError(f"{error.message}{hint}"))
