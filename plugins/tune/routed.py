"""Makes graphs of token-routed models for any k without tracing each k.

In such a graph, k is a constant outside the experts. Tracing a language model takes seconds to
minutes, so two traces with different k show where k is in the graph, and any other k is written
there. The point that a search chooses is traced again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from ...errors import MoexportError, UsageError
from ...exporter.job import ExportJob
from ...exporter.model import Model
from ...exporter.trace import trace


def routed_layers(model: Model) -> frozenset[str]:
    """Returns the layers whose experts are chosen by a router outside the layer."""
    return frozenset(name for name, layer in model.layers.items() if layer.spec.kind == "experts")


def can_choose_k(model: Model, layer: str, k: int) -> bool:
    """Returns whether the model's routers can choose k experts in one layer."""
    trained = {name: moe.spec.trained_k for name, moe in model.layers.items()}
    try:
        model.host.with_k(model, {**trained, layer: k})
    except UsageError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Place:
    """Where k is in a node: in elements of a constant input, or axes of an output's shape."""

    node: int
    index: int
    of_shape: bool
    elements: tuple[int, ...]


class Traces:
    """Provides the traced graph of a model for any k of its layers."""

    def __init__(self, base: ExportJob, traced: ir.Model) -> None:
        self._base, self._traced = base, traced
        self._routed = routed_layers(base.model)
        self._trained = {n: base.model.layers[n].spec.trained_k for n in self._routed}
        self._known: dict[tuple[int, ...], ir.Model] = {tuple(self._trained.values()): traced}

    def of(self, job: ExportJob) -> ir.Model:
        """Returns the graph for the k of a job."""
        ks = {name: job.k[name] or self._trained[name] for name in self._trained}
        key = tuple(ks.values())
        if key not in self._known:
            self._known[key] = _traced(job) if self._places is None else self._with(ks)
        return self._known[key]

    @cached_property
    def _places(self) -> dict[str, tuple[_Place, ...]] | None:
        """The places of k, from the graphs as trained and with k = 1; None if unknown."""
        model = self._base.model
        try:
            ones = model.host.with_k(model, dict.fromkeys(model.layers, 1))
            other = _traced(replace(self._base, model=ones))
        except MoexportError:  # a router may refuse k = 1; each k is then traced
            return None
        return _places(self._traced, other, self._trained)

    def _with(self, ks: Mapping[str, int]) -> ir.Model:
        """Returns the graph as trained, with other numbers at the places of k."""
        assert self._places is not None
        changed = self._traced.clone()
        nodes = list(changed.graph)
        for name, k in ks.items():
            for place in self._places[name]:
                _write(changed, nodes[place.node], place, k)
        return changed


def _traced(job: ExportJob) -> ir.Model:
    return trace(job.model, opset=job.options.least_opset, fixed=job.fixed)


def _places(
    first: ir.Model, second: ir.Model, trained: Mapping[str, int]
) -> dict[str, tuple[_Place, ...]] | None:
    """Returns the places of k by layer, from two graphs; None if these differ in more than k.

    In the second graph, k is 1.
    """
    nodes, others = list(first.graph), list(second.graph)
    if len(nodes) != len(others):
        return None
    modules = {name.rpartition(".")[0]: name for name in trained}
    places: dict[str, list[_Place]] = {name: [] for name in trained}
    for at, (a, b) in enumerate(zip(nodes, others, strict=True)):
        if not _same_op(a, b):
            return None
        path = (a.name or "").rpartition("/")[0]
        layer = next((n for p, n in modules.items() if path == p or path.startswith(f"{p}.")), None)
        for index, of_shape, here, there in _differences(a, b):
            elements = None if layer is None else _k_elements(here, there, trained[layer])
            if layer is not None and elements is not None:
                places[layer].append(
                    _Place(node=at, index=index, of_shape=of_shape, elements=elements)
                )
            elif not of_shape:  # a different shape only follows from other values
                return None
    if not all(any(not place.of_shape for place in listed) for listed in places.values()):
        return None
    return {name: tuple(listed) for name, listed in places.items()}


def _same_op(a: ir.Node, b: ir.Node) -> bool:
    """Returns whether two nodes have the same op, attributes and number of inputs."""
    same = (a.op_type, a.domain, a.name) == (b.op_type, b.domain, b.name)
    if not same or len(a.inputs) != len(b.inputs) or a.attributes.keys() != b.attributes.keys():
        return False
    if a.op_type == "Constant":  # the value is compared as the input of another node
        return True
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return all(
        attribute.type not in graphs and str(attribute.value) == str(b.attributes[name].value)
        for name, attribute in a.attributes.items()
        if isinstance(attribute, ir.Attr)
    )


def _differences(
    a: ir.Node, b: ir.Node
) -> Iterator[tuple[int, bool, np.ndarray | None, np.ndarray | None]]:
    """Yields the constant inputs and (with True) the output shapes in which two nodes differ."""
    for index, (here, there) in enumerate(zip(a.inputs, b.inputs, strict=True)):
        first, second = _constant(here), _constant(there)
        if not _same(first, second):
            yield index, False, first, second
    for index, (y, z) in enumerate(zip(a.outputs, b.outputs, strict=True)):
        first, second = _sizes(y), _sizes(z)
        if not _same(first, second):
            yield index, True, first, second


def _sizes(value: ir.Value) -> np.ndarray | None:
    """Returns a shape as an array, with 0 for dynamic axes; None if it is unknown."""
    if value.shape is None:
        return None
    return np.array([size if isinstance(size, int) else 0 for size in value.shape])


def _constant(value: ir.Value | None) -> np.ndarray | None:
    """Returns an integer constant as an array; None for any other value."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None  # weights do not contain k
    array: np.ndarray = tensor.numpy()
    return array


def _same(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and bool((first == second).all())


def _k_elements(a: np.ndarray | None, b: np.ndarray | None, k: int) -> tuple[int, ...] | None:
    """Returns the elements that are k in array a and 1 in array b; None if others differ."""
    if a is None or b is None or a.shape != b.shape:
        return None
    differing = np.flatnonzero(a.ravel() != b.ravel())
    if not ((a.ravel()[differing] == k).all() and (b.ravel()[differing] == 1).all()):
        return None
    return tuple(map(int, differing))


def _write(model: ir.Model, node: ir.Node, place: _Place, k: int) -> None:
    """Writes k into the model at one of its places."""
    if place.of_shape:
        value = node.outputs[place.index]
        assert value.shape is not None
        sizes = [k if at in place.elements else size for at, size in enumerate(value.shape)]
        value.shape = ir.Shape(sizes)
        return
    array = _constant(node.inputs[place.index])
    assert array is not None, "the place had a constant before"
    array = array.copy()
    array.flat[list(place.elements)] = k
    name = f"{node.name}.k{place.index}"
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    model.graph.initializers[name] = value
    node.replace_input_with(place.index, value)
