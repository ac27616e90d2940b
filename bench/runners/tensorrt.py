"""An engine of TensorRT, opened here or in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ...calibration.feeds import Array
from ...exporter.bundle.bundle import Bundle
from ...exporter.inputs import Inputs
from ...exporter.tensorrt.engines import add_engines, plan_engines
from ...exporter.tensorrt.options import EngineOptions
from ...exporter.tensorrt.profiles import check_k
from ...exporter.tensorrt.records import engines_of
from ...exporter.tensorrt.session import EngineSession
from ...graphs.names import SELECTED
from .base import GraphFile, Loader, Runner, first_of, in_batches


@dataclass(frozen=True)
class EngineRunner(Runner):
    """An engine, opened; `selected_values` names outputs that hold what a layer chose."""

    session: EngineSession
    k: int | None
    selected_values: Mapping[str, str] = field(default_factory=dict)

    def infer(self, x: Inputs, output: int = 0) -> Array:
        """Maps inputs [b, …] to outputs [b, …], in batches of sizes that its profiles take."""
        name = self.session.output_names[output]
        return self._in_batches(
            lambda part: self.session.run(part, self.k, [name])[name], first_of(x)
        )

    def selected(self, x: Inputs) -> dict[str, Array] | None:
        """Returns the chosen experts [b, k], ascending, of each layer whose choice is an output."""
        if not self.selected_values:
            return None
        parts: dict[str, list[Array]] = {layer: [] for layer in self.selected_values}

        def looked_at(part: Array) -> Array:
            values = self.session.run(part, self.k, list(self.selected_values.values()))
            for layer, name in self.selected_values.items():
                parts[layer].append(np.sort(values[name], axis=1))
            return part

        self._in_batches(looked_at, first_of(x))
        return {layer: np.concatenate(chosen) for layer, chosen in parts.items()}

    def device_ms(self, x: Inputs) -> float:
        """Returns the GPU's time for inputs [b, …], in the same batches; copies are not in it."""
        times: list[float] = []

        def timed(part: Array) -> Array:
            times.append(self.session.gpu_ms(part, self.k))
            return part

        self._in_batches(timed, first_of(x))
        return sum(times)

    def _in_batches(self, run: Callable[[Array], Array], x: Array) -> Array:
        sizes = [(profile.min[0], profile.max[0]) for profile in self.session.profiles]
        return in_batches(
            run,
            x,
            most=max(high for _, high in sizes),
            takes=lambda size: any(low <= size <= high for low, high in sizes),
        )


@dataclass(frozen=True)
class EngineLoader(Loader):
    """Opens the engine of a bundle's graph.

    With its `options` an engine that is not there is compiled: the precision that was built is
    checked as `moexport build` does it, and the engine is kept for the next time.
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
        shown = {
            layer: value
            for layer, value in named.items()
            if value in session.output_names and value.endswith(f"/{SELECTED}")
        }
        return EngineRunner(session, k, shown)

    def build(self, options: EngineOptions) -> None:
        """Puts the engine into the bundle, unless it is there."""
        file, bundle = self.graph.path.name, self.graph.path.parent
        manifest = Bundle.open(bundle).manifest
        there = {(engine.flavour, engine.graph) for engine in engines_of(manifest)}
        if (self.backend, file) not in there:
            graph = next(graph for graph in manifest.graphs if graph.file == file)
            # Coefficients of every token, as muMoE layers have them, would slow down what is timed.
            sets = any(value.endswith(f"/{SELECTED}") for value in graph.selected.values())
            options = replace(options, expose_routing=sets)
            plans = plan_engines(manifest, self.backend, options, graph=file)
            add_engines(bundle, manifest, plans)
