"""An exported graph in ONNX Runtime or OpenVINO, opened here or in another process.

Imports ONNX Runtime alone: the process that measures a graph's memory must not hold PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...calibration.feeds import Array
from ...common.writing import scratch_folder
from ...exporter.bundle.runtimes import opened
from ...exporter.inputs import Inputs
from ...exporter.session import CPU, OPENVINO, Session, SessionOptions
from .base import GraphLoader, Runner, chosen_experts, first_of

INT64 = 7  # the element type of chosen experts: onnx.TensorProto.INT64


@dataclass(frozen=True)
class OnnxRunner(Runner):
    """An exported graph, opened."""

    wraps: ClassVar[bool] = True

    session: Session
    selected_values: Mapping[str, str]
    experts: Mapping[str, int]
    k: int | None

    @property
    def computed_in(self) -> str | None:
        return self.session.computed_in

    def infer(self, x: Inputs, output: int = 0) -> Array:
        name = self.session.output_names[output]
        return self.session.run(x, self.k, [name])[name]

    def bound(self, x: Inputs) -> Callable[[], list[Any]]:
        """Returns the runtime's own call for inputs [b, …], with its first output.

        Of a graph with a cache every output is returned, and all stays where the runtime has it: so
        the next call of a text being generated takes it.
        """
        own = [n for n in self.session.output_names if n not in self.selected_values.values()]
        if len(own) > 1:
            return self.session.bound_values(x, self.k, own)
        return self.session.bound(x, self.k)

    def selected(self, x: Inputs) -> dict[str, Array] | None:
        """Returns the chosen experts [b, k], ascending, of each layer: all n without a choice.

        None of a graph of whose layers nothing is known.
        """
        if not self.experts:
            return None
        wanted = list(self.selected_values.values())
        values = self.session.run(x, self.k, wanted) if wanted else {}
        selected = {layer: values[name] for layer, name in self.selected_values.items()}
        return chosen_experts(selected, self.experts, len(first_of(x)))


@dataclass(frozen=True)
class OnnxLoader(GraphLoader[OnnxRunner]):
    """Opens a graph file in one of ONNX Runtime's providers."""

    profiles: ClassVar[bool] = True

    provider: str = CPU

    def opened(self, observed: Mapping[str, str], experts: Mapping[str, int]) -> OnnxRunner:
        """Opens a session whose outputs hold the chosen experts too."""
        observe = dict.fromkeys(observed.values(), INT64)
        session = opened(self.graph.path, replace(self._options, observe=observe))
        return OnnxRunner(session, observed, experts, self.graph.k)

    def profile(self, batches: Sequence[Inputs], calls: int) -> list[dict[str, Any]]:
        """Returns the runtime's timing of every node over `calls` calls, batches in turn."""
        with scratch_folder("profile") as folder:
            options = replace(self._options, profile=folder / "profile")
            session = Session(self.graph.path, options)
            for index in range(calls):
                session(batches[index % len(batches)], self.graph.k)
            events: list[dict[str, Any]] = json.loads(session.end_profile().read_text("utf-8"))
        return events

    @property
    def _options(self) -> SessionOptions:
        return SessionOptions(provider=self.provider, threads=self.graph.threads)


@dataclass(frozen=True)
class OpenVinoLoader(OnnxLoader):
    """Opens a graph file in OpenVINO on the CPU, where it computes in the graph's own types."""

    profiles: ClassVar[bool] = False

    @property
    def _options(self) -> SessionOptions:
        return SessionOptions(runtime=OPENVINO, threads=self.graph.threads)


@dataclass(frozen=True)
class OtherExporterLoader(OnnxLoader):
    """Opens a graph of another exporter: its nodes do not tell which layer they belong to."""

    profiles: ClassVar[bool] = False
