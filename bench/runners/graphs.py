"""An exported graph in the runtime of its session, opened here or in another process.

Imports no PyTorch: the process that measures a graph's memory must not hold it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...common.writing import scratch_folder
from ...data.feeds import Array
from ...exporter.bundle.runtimes import RUNTIMES, opened
from ...exporter.inputs import Inputs
from ...exporter.session import GraphSession, Session, SessionOptions
from .base import GraphLoader, Runner, chosen_experts, first_of

INT64 = 7  # the element type of chosen experts: onnx.TensorProto.INT64


@dataclass(frozen=True)
class SessionRunner(Runner):
    """A graph or engine, opened: its session with a k, and what its layers choose.

    `selected_values` names the outputs that hold it, and `experts` n of every layer that could.
    """

    session: GraphSession
    k: int | None
    selected_values: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)

    def infer(self, x: Inputs, output: int = 0) -> Array:
        name = self.session.output_names[output]
        return self.outputs(x, [name])[name]

    def selected(self, x: Inputs) -> dict[str, Array] | None:
        """Returns the chosen experts [b, k], ascending, of each layer: all n without a choice.

        None of a graph of whose layers nothing is known.
        """
        if not self.experts:
            return None
        wanted = list(self.selected_values.values())
        values = self.outputs(x, wanted) if wanted else {}
        selected = {layer: values[name] for layer, name in self.selected_values.items()}
        return chosen_experts(selected, self.experts, len(first_of(x)))

    def outputs(self, x: Inputs, names: Sequence[str]) -> dict[str, Array]:
        """Returns outputs by name."""
        return self.session.run(x, self.k, names)


@dataclass(frozen=True)
class GraphRunner(SessionRunner):
    """An exported graph, opened: what is timed is the runtime's own call."""

    wraps: ClassVar[bool] = True

    session: Session

    @property
    def computed_in(self) -> str | None:
        return self.session.computed_in

    def bound(self, x: Inputs) -> Callable[[], list[Any]]:
        """Returns the runtime's own call for inputs [b, …], with its first output.

        Of a graph with a cache every output is returned, and all stays where the runtime has it: so
        the next call of a text being generated takes it.
        """
        own = [n for n in self.session.output_names if n not in self.selected_values.values()]
        if len(own) > 1:
            return self.session.bound_values(x, self.k, own)
        return self.session.bound(x, self.k)


@dataclass(frozen=True)
class SessionLoader(GraphLoader[GraphRunner]):
    """Opens a graph file as the `options` say, with the threads of the graph.

    Where the nodes do not tell which layer is theirs, as in graphs of other exporters, a profile
    tells nothing: such a graph has no `parts`.
    """

    options: SessionOptions = SessionOptions()
    parts: bool = True

    @property
    def profiles(self) -> bool:
        return self.parts and "profile" in RUNTIMES[self.options.runtime].takes

    def opened(self, observed: Mapping[str, str], experts: Mapping[str, int]) -> GraphRunner:
        """Opens a session whose outputs hold the chosen experts too."""
        session = self._session(observe=dict.fromkeys(observed.values(), INT64))
        return GraphRunner(session, self.graph.k, observed, experts)

    def profile(self, batches: Sequence[Inputs], calls: int) -> list[dict[str, Any]]:
        """Returns the runtime's timing of every node over `calls` calls, batches in turn."""
        with scratch_folder("profile") as folder:
            session = self._session(profile=folder / "profile")
            for index in range(calls):
                session(batches[index % len(batches)], self.graph.k)
            events: list[dict[str, Any]] = json.loads(session.end_profile().read_text("utf-8"))
        return events

    def _session(self, **asked: Any) -> Session:
        options = replace(self.options, threads=self.graph.threads, **asked)
        return opened(self.graph.path, options)
