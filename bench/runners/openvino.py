"""An exported graph in OpenVINO, opened here or in another process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...calibration.feeds import Array
from ...errors import EngineError
from ...exporter.inputs import Inputs
from ...graphs.names import K_INPUT
from .base import GraphLoader, Runner, chosen_experts, first_of

if TYPE_CHECKING:
    import openvino

DEVICE = "CPU"

PRODUCTS = ("FullyConnected", "MatMul", "Convolution", "GatherMatmul")
"""The layers of a compiled graph, as OpenVINO calls them, in which a network's time goes."""


@dataclass(frozen=True)
class OpenVinoRunner(Runner):
    """An exported graph, compiled for the CPU; `observed` are the chosen experts among its outputs.

    `precision` is what the compiled graph says that it multiplies in.
    """

    wraps: ClassVar[bool] = True

    request: openvino.InferRequest
    input_name: str
    observed: Mapping[str, str]
    experts: Mapping[str, int]
    k: int | None
    precision: str

    @property
    def computed_in(self) -> str:
        """The precision of the matrix products."""
        return self.precision

    def infer(self, x: Inputs) -> Array:
        """Maps inputs [b, …] to outputs [b, …]."""
        output: Array = self.bound(x)()[0]
        return output

    def bound(self, x: Inputs) -> Callable[[], Any]:
        """Returns the runtime's own call for inputs [b, …]: its outputs, by number and name."""
        feeds = {self.input_name: np.ascontiguousarray(first_of(x))}
        if self.k is not None:
            feeds[K_INPUT] = np.array([self.k], np.int64)
        return partial(self.request.infer, feeds, share_inputs=True)

    def selected(self, x: Inputs) -> dict[str, Array] | None:
        """Returns the chosen experts [b, k], ascending, of each layer: all n without a choice."""
        if not self.experts:
            return None
        values = self.bound(x)()
        found = {layer: values[name] for layer, name in self.observed.items()}
        return chosen_experts(found, self.experts, len(first_of(x)))


@dataclass(frozen=True)
class OpenVinoLoader(GraphLoader[OpenVinoRunner]):
    """Opens a graph file on the CPU."""

    def opened(self, observed: Mapping[str, str], experts: Mapping[str, int]) -> OpenVinoRunner:
        """Compiles the graph; raises `EngineError` where OpenVINO cannot."""
        import openvino

        # By itself it computes FP32 graphs in BF16 where the CPU has instructions for it.
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        if self.threads is not None:
            settings["INFERENCE_NUM_THREADS"] = self.threads
        core = openvino.Core()
        try:
            graph = core.read_model(self.path)
            there = {name for output in graph.outputs for name in output.names}
            if graph.is_dynamic() and any(op.get_type_name() == "If" for op in graph.get_ops()):
                raise EngineError(
                    f"{self.path.name}: OpenVINO computes `If` wrongly where the batch is dynamic",
                    hint="use another lowering than conditional, or export with a fixed --batch",
                )
            graph.add_outputs([value for value in observed.values() if value not in there])
            compiled = core.compile_model(graph, DEVICE, settings)
        except RuntimeError as error:
            raise EngineError(
                f"OpenVINO cannot load {self.path.name}: {_words(error)}",
                hint="another --lowering may run; `dense` needs the fewest ops",
            ) from error
        (name,) = {port.any_name for port in compiled.inputs} - {K_INPUT}
        request = compiled.create_infer_request()
        return OpenVinoRunner(request, name, observed, experts, self.k, _precision(compiled))


def _precision(compiled: openvino.CompiledModel) -> str:
    """The types that the products of a compiled graph are computed in: `f32`, or `f32, u8`."""
    facts = (layer.get_rt_info() for layer in compiled.get_runtime_model().get_ordered_ops())
    found = {
        str(each["runtimePrecision"].value)
        for each in facts
        if str(each["layerType"].value) in PRODUCTS
    }
    return ", ".join(sorted(found)) or str(compiled.get_property("INFERENCE_PRECISION_HINT"))


def _words(error: RuntimeError) -> str:
    """What OpenVINO says of an error, without the places in its sources."""
    said = [line.strip() for line in str(error).splitlines()]
    told = [s for s in said if s and not re.match(r"(Exception from|Check .* failed at) ", s)]
    return " ".join(told) or said[0]
