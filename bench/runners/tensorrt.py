"""An engine of TensorRT as the benchmark runs it, opened here or in another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...exporter.bundle.bundle import Bundle
from ...exporter.tensorrt.engines import add_engines, plan_engines
from ...exporter.tensorrt.options import EngineOptions
from ...exporter.tensorrt.profiles import check_k
from ...exporter.tensorrt.records import engines_of
from ...exporter.tensorrt.session import EngineSession
from ..data import Array, in_batches


@dataclass(frozen=True)
class EngineRunner:
    """An engine, opened; it does not show what its layers choose."""

    session: EngineSession
    k: int | None

    def __call__(self, x: Array) -> Array:
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
class BundleEngine:
    """Opens the engine that a bundle has of a graph; `k` is given where it is a graph input."""

    bundle: Path
    backend: str
    graph: str
    k: int | None = None

    def __call__(self) -> EngineRunner:
        """Opens the engine; `EngineError` where the bundle has none.

        A k outside its profiles is a `UsageError` before it is loaded.
        """
        opened = Bundle.open(self.bundle)
        check_k(opened.engine_record(self.backend, self.graph).ranges, self.k)
        session = opened.engine(self.backend, self.graph, eager=True)
        return EngineRunner(session, self.k)


@dataclass(frozen=True)
class GraphEngine:
    """Opens the engine of a graph that a sweep has exported; it is compiled the first time.

    The precision that was built is checked as `moexport build` does it, and the engine is kept for
    the next time where those are.
    """

    bundle: Path
    backend: str
    graph: str
    options: EngineOptions

    def __call__(self) -> EngineRunner:
        """Opens the engine; `EngineError` where it cannot be compiled as asked, or not run."""
        self.build()
        return BundleEngine(self.bundle, self.backend, self.graph)()

    def build(self) -> None:
        """Puts the engine into the bundle, unless it is there."""
        manifest = Bundle.open(self.bundle).manifest
        there = {(each.flavour, each.graph) for each in engines_of(manifest)}
        if (self.backend, self.graph) not in there:
            plans = plan_engines(manifest, self.backend, self.options, graph=self.graph)
            add_engines(self.bundle, manifest, plans)
