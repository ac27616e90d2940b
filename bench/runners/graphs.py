"""An exported graph in its runtime, opened here or in another process.

This module does not import PyTorch, which the process that measures memory must not load.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...common.writing import scratch_folder
from ...data.batches import Array
from ...exporter.bundle.runtimes import RUNTIMES, open_graph
from ...exporter.inputs import Inputs
from ...exporter.session import GraphSession, Session, SessionOptions
from ...graphs.names import is_score
from .base import GraphLoader, Runner, chosen_experts, first_of

INT64 = 7  # the element type of chosen experts: onnx.TensorProto.INT64


@dataclass(frozen=True)
class SessionRunner(Runner):
    """An open graph or engine: its session with a k, and the choices of its layers.

    `selected_values` names the outputs with the choices, and `experts` is n by layer.
    """

    session: GraphSession
    k: int | None
    selected_values: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)

    def infer(self, x: Inputs, output: int = 0) -> Array:
        name = self.session.output_names[output]
        return self.outputs(x, [name])[name]

    def selected(self, x: Inputs) -> dict[str, Array] | None:
        """Returns the chosen experts [b, k], ascending, by layer: all n if a layer does not choose.

        Returns None for a graph whose layers are unknown.
        """
        if not self.experts:
            return None
        wanted = list(self.selected_values.values())
        values = self.outputs(x, wanted) if wanted else {}
        selected = {layer: values[name] for layer, name in self.selected_values.items()}
        return chosen_experts(selected, self.experts, len(first_of(x)))

    def outputs(self, x: Inputs, names: Sequence[str]) -> dict[str, Array]:
        return self.session.run(x, self.k, names)


@dataclass(frozen=True)
class GraphRunner(SessionRunner):
    """An open exported graph, timed by the runtime's own call."""

    wraps: ClassVar[bool] = True

    session: Session

    @property
    def computed_in(self) -> str | None:
        return self.session.computed_in

    def device_ms(self, x: Inputs) -> float | None:
        """Returns the GPU's time for inputs [b, …], replayed if possible; None on a CPU."""
        return self.session.gpu_ms(x, self.k)

    @property
    def no_cuda_graph(self) -> str | None:
        return None if self.session.recorded is None else self.session.no_cuda_graphs

    def bound(self, x: Inputs) -> Callable[[], list[Any]]:
        """Returns the runtime's own call for inputs [b, …] and the graph's first output.

        A graph with a cache leaves every output on the runtime's device, where the next token
        needs it.
        """
        routing = {*self.selected_values.values()}
        outputs = [
            name
            for name in self.session.output_names
            if name not in routing and not is_score(name, self.experts)
        ]
        if len(outputs) > 1:
            return self.session.bound_values(x, self.k, outputs)
        return self.session.bound(x, self.k)


@dataclass(frozen=True)
class SessionLoader(GraphLoader[GraphRunner]):
    """Opens a graph file with `options` and the threads of the graph.

    `parts` is False if nodes are not named by layer, as in graphs of other exporters.
    """

    options: SessionOptions = SessionOptions()
    parts: bool = True

    @property
    def profiles(self) -> bool:
        return self.parts and "profile" in RUNTIMES[self.options.runtime].takes

    def open_graph(self, observed: Mapping[str, str], experts: Mapping[str, int]) -> GraphRunner:
        session = self._session(observe=dict.fromkeys(observed.values(), INT64))
        return GraphRunner(session, self.graph.k, observed, experts)

    def profile(self, batches: Sequence[Inputs], calls: int) -> list[dict[str, Any]]:
        with scratch_folder("profile") as folder:
            session = self._session(profile=folder / "profile")
            for index in range(calls):
                session(batches[index % len(batches)], self.graph.k)
            events: list[dict[str, Any]] = json.loads(session.end_profile().read_text("utf-8"))
        return events

    def _session(self, **changes: Any) -> Session:
        options = replace(self.options, threads=self.graph.threads, **changes)
        return open_graph(self.graph.path, options)
