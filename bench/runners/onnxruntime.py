"""An exported graph as the benchmark runs it, and how it is opened here or in another process.

Imports ONNX Runtime alone: the process that measures a graph's memory must not hold PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...exporter.session import CPU, Session, SessionOptions
from ..data import Array

INT64 = 7
"""The element type of chosen experts: onnx.TensorProto.INT64."""


@dataclass(frozen=True)
class OnnxGraph:
    """An exported graph, opened (`engines.Graph`)."""

    session: Session
    selected_values: Mapping[str, str]
    experts: Mapping[str, int]
    k: int | None

    def __call__(self, x: Array) -> Array:
        """Maps inputs [b, …] to outputs [b, …]."""
        return self.session(x, self.k)

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
class OnnxOpener:
    """Opens a graph file; a plain value, so that another process can do it too.

    `selected` names the values that hold the chosen experts [b, k] of the layers that choose, and
    `experts` n of every layer that could. `k` is given where it is a graph input.
    """

    path: Path
    selected: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    k: int | None = None
    threads: int | None = None
    provider: str = CPU

    def __call__(self) -> OnnxGraph:
        """Opens the graph, with the chosen experts as further outputs."""
        sets = {layer: value for layer, value in self.selected.items() if layer in self.experts}
        observe = dict.fromkeys(sets.values(), INT64)
        options = SessionOptions(provider=self.provider, threads=self.threads, observe=observe)
        return OnnxGraph(Session(self.path, options), sets, self.experts, self.k)

    def plain(self) -> OnnxGraph:
        """Opens the graph as it is deployed: with nothing to observe."""
        options = SessionOptions(provider=self.provider, threads=self.threads)
        return OnnxGraph(Session(self.path, options), {}, {}, self.k)

    def profiled(self, prefix: Path) -> OnnxGraph:
        """Opens the graph so that the runtime times its nodes."""
        options = SessionOptions(provider=self.provider, threads=self.threads, profile=prefix)
        return OnnxGraph(Session(self.path, options), {}, {}, self.k)
