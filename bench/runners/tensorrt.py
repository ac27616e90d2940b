"""An engine of TensorRT, opened here or in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from .base import Loader, Runner, first_of, in_batches


@dataclass(frozen=True)
class EngineRunner(Runner):
    """An engine, opened; `selected_values` names outputs that hold what a layer chose."""

    session: EngineSession
    k: int | None
    selected_values: Mapping[str, str] = field(default_factory=dict)

    def infer(self, x: Inputs) -> Array:
        """Maps inputs [b, …] to outputs [b, …], in batches of sizes that its profiles take."""
        return self._in_batches(lambda part: self.session(part, self.k), first_of(x))

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
        return {layer: np.concatenate(found) for layer, found in parts.items()}

    def device_ms(self, x: Inputs) -> float:
        """Returns the GPU's time for inputs [b, …], in the same batches; copies are not in it."""
        found: list[float] = []

        def timed(part: Array) -> Array:
            found.append(self.session.gpu_ms(part, self.k))
            return part

        self._in_batches(timed, first_of(x))
        return sum(found)

    def _in_batches(self, run: Callable[[Array], Array], x: Array) -> Array:
        sizes = [(each.min[0], each.max[0]) for each in self.session.profiles]
        return in_batches(
            run,
            x,
            most=max(high for _, high in sizes),
            takes=lambda size: any(low <= size <= high for low, high in sizes),
        )


@dataclass(frozen=True)
class EngineLoader(Loader):
    """Opens the engine of a bundle's graph; `k` is given where it is a graph input.

    With `options` an engine that is not there is compiled: the precision that was built is checked
    as `moexport build` does it, and the engine is kept for the next time where those are.
    """

    bundle: Path
    backend: str
    graph: str
    k: int | None = None
    options: EngineOptions | None = None

    def __call__(self) -> EngineRunner:
        """Opens the engine or raises EngineError; a k outside its profiles is a UsageError."""
        if self.options is not None:
            self.build(self.options)
        opened = Bundle.open(self.bundle)
        check_k(opened.engine_record(self.backend, self.graph).ranges, self.k)
        session = opened.engine(self.backend, self.graph, eager=True)
        named = opened.graph(self.graph).selected
        shown = {
            layer: value
            for layer, value in named.items()
            if value in session.output_names and value.endswith(f"/{SELECTED}")
        }
        return EngineRunner(session, self.k, shown)

    def build(self, options: EngineOptions) -> None:
        """Puts the engine into the bundle, unless it is there."""
        manifest = Bundle.open(self.bundle).manifest
        there = {(each.flavour, each.graph) for each in engines_of(manifest)}
        if (self.backend, self.graph) not in there:
            graph = next(each for each in manifest.graphs if each.file == self.graph)
            # Coefficients of every token, as muMoE layers have them, would slow down what is timed.
            sets = any(value.endswith(f"/{SELECTED}") for value in graph.selected.values())
            asked = replace(options, expose_routing=sets)
            plans = plan_engines(manifest, self.backend, asked, graph=self.graph)
            add_engines(self.bundle, manifest, plans)
