"""An exported graph in ONNX Runtime, opened here or in another process.

Imports ONNX Runtime alone: the process that measures a graph's memory must not hold PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...calibration.feeds import Array
from ...common.writing import scratch_folder
from ...exporter.session import CPU, Session, SessionOptions
from .base import Loader, Runner

INT64 = 7  # the element type of chosen experts: onnx.TensorProto.INT64


@dataclass(frozen=True)
class OnnxRunner(Runner):
    """An exported graph, opened."""

    wraps: ClassVar[bool] = True

    session: Session
    selected_values: Mapping[str, str]
    experts: Mapping[str, int]
    k: int | None

    def infer(self, x: Array) -> Array:
        """Maps inputs [b, …] to outputs [b, …]."""
        return self.session(x, self.k)

    def bound(self, x: Array) -> Callable[[], list[Array]]:
        """Returns the bare `session.run` for inputs [b, …], with the first output alone."""
        return self.session.bound(x, self.k)

    def selected(self, x: Array) -> dict[str, Array]:
        """Returns the chosen experts [b, k], ascending, of each layer: all n without a choice."""
        wanted = list(self.selected_values.values())
        values = self.session.run(x, self.k, wanted) if wanted else {}
        return {
            layer: np.sort(values[self.selected_values[layer]], axis=1)
            if layer in self.selected_values
            else np.tile(np.arange(n), (len(x), 1))
            for layer, n in self.experts.items()
        }


@dataclass(frozen=True)
class OnnxLoader(Loader):
    """Opens a graph file; a plain value, so that another process can do it too.

    `selected` names the values that hold the chosen experts [b, k] of the layers that choose, and
    `experts` n of every layer that could. `k` is given where it is a graph input.
    """

    profiles: ClassVar[bool] = True

    path: Path
    selected: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    k: int | None = None
    threads: int | None = None
    provider: str = CPU

    def __call__(self) -> OnnxRunner:
        """Opens the graph, with the chosen experts as further outputs."""
        sets = {layer: value for layer, value in self.selected.items() if layer in self.experts}
        observe = dict.fromkeys(sets.values(), INT64)
        session = Session(self.path, replace(self._options, observe=observe))
        return OnnxRunner(session, sets, self.experts, self.k)

    def deployed(self) -> OnnxRunner:
        """Opens the graph as it is deployed: with nothing to observe."""
        return OnnxRunner(Session(self.path, self._options), {}, {}, self.k)

    def profile(self, batches: Sequence[Array], calls: int) -> list[dict[str, Any]]:
        """Returns the runtime's timing of every node over `calls` calls, batches in turn."""
        with scratch_folder("profile") as folder:
            options = replace(self._options, profile=folder / "profile")
            session = Session(self.path, options)
            for index in range(calls):
                session(batches[index % len(batches)], self.k)
            events: list[dict[str, Any]] = json.loads(session.end_profile().read_text("utf-8"))
        return events

    @property
    def file(self) -> Path:
        """The graph's file."""
        return self.path

    @property
    def _options(self) -> SessionOptions:
        return SessionOptions(provider=self.provider, threads=self.threads)
