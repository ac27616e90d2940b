"""A TensorRT engine, opened here or in another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...data.batches import Array
from ...exporter.bundle.bundle import Bundle
from ...exporter.inputs import Inputs
from ...exporter.tensorrt.engines import add_engines, plan_engines
from ...exporter.tensorrt.options import EngineOptions
from ...exporter.tensorrt.profiles import check_k
from ...exporter.tensorrt.records import engines_of
from ...exporter.tensorrt.session import EngineSession
from ...graphs.names import SELECTED
from .base import GraphFile, Loader, first_of, fitting
from .graphs import SessionRunner


@dataclass(frozen=True)
class EngineRunner(SessionRunner):
    """An open engine: inputs run in batches of sizes within its profiles."""

    session: EngineSession

    def outputs(self, x: Inputs, names: Sequence[str]) -> dict[str, Array]:
        parts = [
            {name: y[:rows] for name, y in self.session.run(part, self.k, names).items()}
            for part, rows in self._fitting(x)
        ]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def device_ms(self, x: Inputs) -> float:
        return sum(self.session.gpu_ms(part, self.k) for part, _ in self._fitting(x))

    def _fitting(self, x: Inputs) -> Iterator[tuple[Array, int]]:
        sizes = [(profile.min[0], profile.max[0]) for profile in self.session.profiles]
        return fitting(
            first_of(x),
            limit=max(high for _, high in sizes),
            accepts=lambda size: any(low <= size <= high for low, high in sizes),
        )


@dataclass(frozen=True)
class EngineLoader(Loader):
    """Opens the engine of a bundle's graph.

    With `options` a missing engine is compiled: the built precision is checked as in `moexport
    build`, and the engine is kept.
    """

    graph: GraphFile
    backend: str

    def __call__(self) -> EngineRunner:
        """Opens the engine or raises EngineError; a k outside its profiles is a UsageError."""
        if self.graph.options is not None:
            self.build(self.graph.options)
        file, k = self.graph.path.name, self.graph.k
        opened = Bundle.open(self.graph.path.parent)
        check_k(opened.engine_record(self.backend, file).ranges, k)
        session = opened.engine(self.backend, file, eager=True)
        named = opened.graph(file).selected
        observed = {
            layer: value
            for layer, value in named.items()
            if value in session.output_names and value.endswith(f"/{SELECTED}")
        }
        experts = {layer: self.graph.experts.get(layer, 0) for layer in observed}
        return EngineRunner(session, k, observed, experts)

    def build(self, options: EngineOptions) -> None:
        """Adds the engine to the bundle, unless it exists."""
        file, bundle = self.graph.path.name, self.graph.path.parent
        manifest = Bundle.open(bundle).manifest
        existing = {(engine.flavour, engine.graph) for engine in engines_of(manifest)}
        if (self.backend, file) not in existing:
            graph = next(graph for graph in manifest.graphs if graph.file == file)
            # Coefficients of every token, as in muMoE layers, would slow the timed calls down.
            exposed = any(value.endswith(f"/{SELECTED}") for value in graph.selected.values())
            options = replace(options, expose_routing=exposed)
            plans = plan_engines(manifest, self.backend, options, graph=file)
            add_engines(bundle, manifest, plans)
