"""An engine of TensorRT as the benchmark runs it, opened here or in another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..exporter.bundle import Bundle
from ..exporter.engines.build import build_engine
from ..exporter.engines.flavours import FLAVOURS
from ..exporter.engines.importer import check_graph
from ..exporter.engines.options import CURRENT, EngineOptions
from ..exporter.engines.profiles import Profile
from ..exporter.engines.session import EngineSession
from ..exporter.progress import Silent
from .data import Array


@dataclass(frozen=True)
class EngineRunner:
    """An engine, opened; it does not show what its layers choose."""

    session: EngineSession
    k: int | None

    def __call__(self, x: Array) -> Array:
        """Maps inputs [b, …] to outputs [b, …]; more than its profiles take, in several runs."""
        most = max(each.max[0] for each in self.session.profiles)
        parts = [self.session(x[at : at + most], self.k) for at in range(0, len(x), most)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class BundleEngine:
    """Opens the engine that a bundle has of a graph; `k` is given where it is a graph input."""

    bundle: Path
    flavour: str
    graph: str
    k: int | None = None

    def __call__(self) -> EngineRunner:
        """Opens the engine; `EngineError` where the bundle has none."""
        session = Bundle.open(self.bundle).engine(self.flavour, self.graph, eager=True)
        return EngineRunner(session, self.k)


@dataclass(frozen=True)
class GraphEngine:
    """Compiles the engine of a graph beside it, for the GPU here, and opens it.

    `cards` are the compute capabilities where the flavour must be told them.
    """

    graph: Path
    flavour: str
    profile: Profile
    cards: tuple[str, ...] = (CURRENT,)

    def __call__(self) -> EngineRunner:
        """Opens the engine; compiles it the first time."""
        return EngineRunner(EngineSession(self.built(), trust=True, eager=True), None)

    def built(self) -> Path:
        """Returns the engine's file, which is compiled unless it is there."""
        chosen = FLAVOURS[self.flavour]
        path = self.graph.with_name(f"engine-{self.flavour}-{self.graph.stem}.plan")
        if not path.is_file():
            check_graph(self.graph, chosen, ())
            cards = self.cards if chosen.cards else ()
            build_engine(self.graph, chosen, [self.profile], EngineOptions(), cards, path, Silent())
        return path
