"""An engine of TensorRT, opened here or in another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...calibration.feeds import Array
from ...exporter.bundle.bundle import Bundle
from ...exporter.tensorrt.engines import add_engines, plan_engines
from ...exporter.tensorrt.options import EngineOptions
from ...exporter.tensorrt.profiles import check_k
from ...exporter.tensorrt.records import engines_of
from ...exporter.tensorrt.session import EngineSession
from .base import Loader, Runner, in_batches


@dataclass(frozen=True)
class EngineRunner(Runner):
    """An engine, opened; it does not show what its layers choose."""

    session: EngineSession
    k: int | None

    def infer(self, x: Array) -> Array:
        """Maps inputs [b, …] to outputs [b, …], in batches of sizes that its profiles take."""
        return self._in_batches(lambda part: self.session(part, self.k), x)

    def device_ms(self, x: Array) -> float:
        """Returns the GPU's time for inputs [b, …], in the same batches; copies are not in it."""
        found: list[float] = []

        def timed(part: Array) -> Array:
            found.append(self.session.gpu_ms(part, self.k))
            return part

        self._in_batches(timed, x)
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
        return EngineRunner(opened.engine(self.backend, self.graph, eager=True), self.k)

    def build(self, options: EngineOptions) -> None:
        """Puts the engine into the bundle, unless it is there."""
        manifest = Bundle.open(self.bundle).manifest
        there = {(each.flavour, each.graph) for each in engines_of(manifest)}
        if (self.backend, self.graph) not in there:
            plans = plan_engines(manifest, self.backend, options, graph=self.graph)
            add_engines(self.bundle, manifest, plans)
