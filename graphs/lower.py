"""Replaces each MoE node of a traced graph by the nodes of a lowering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from ..errors import LoweringError
from .builder import Builder
from .layers.base import choice_key
from .layers.stored import LayerOf
from .lowerings.base import AnyLowering
from .names import DOMAIN, K_INPUT, STEER_CENTRES, STEER_INPUT, in_layer
from .precision.fp16_weights import compute_in_fp32


def simplify(model: ir.Model) -> None:
    """Drops identities, dead nodes, unused weights, duplicate constants and metadata, in place.

    PyTorch's exporter leaves stack traces with the paths of the machine in the metadata.
    """
    passes = ir.passes.Sequential(
        common.IdentityEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0),
        common.RemoveUnusedNodesPass(),
        common.CommonSubexpressionEliminationPass(),
        common.ClearMetadataAndDocStringPass(),
        common.RemoveUnusedOpsetsPass(),
    )
    passes(model)
    for graph in (graph for graph in model.graphs() if graph is not model.graph):
        _own_outputs(graph)
    for graph in model.graphs():  # that pass leaves the notes on values where they are
        outputs = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *outputs):
            value.metadata_props.clear()


def _own_outputs(graph: ir.Graph) -> None:
    """Makes each output of a subgraph the value of a node of its own, in place.

    A branch must not return a value from outside, and no graph one value twice: either is left
    where an identity is dropped.
    """
    seen: set[ir.Value | None] = {None}
    for index, value in enumerate(graph.outputs):
        node = value.producer()
        outside = (node is None or node.graph is not graph) and value not in graph.inputs
        if outside or value in seen:
            copy = ir.node("Identity", [value])
            copied = copy.outputs[0]
            copied.name = f"{value.name}/returned_{index}"
            copied.shape, copied.type = value.shape, value.type
            graph.append(copy)
            graph.outputs[index] = copied
        seen.add(value)


@dataclass(frozen=True, slots=True)
class LoweringRequest:
    """One layer and how it is lowered."""

    lowering: AnyLowering
    layer: LayerOf[Any]


@dataclass(frozen=True, slots=True)
class LayerValues:
    """Names of the values around a lowered layer, for finding where two graphs part ways.

    `choices` names the values that hold what the layer chose, by `moe.choice_key`; empty where
    every expert is kept.
    """

    input: str
    output: str
    choices: Mapping[str, str]

    @property
    def selected(self) -> str | None:
        """The value of the layer's first choice."""
        return next(iter(self.choices.values()), None)

    def renamed(self, names: Mapping[str, str]) -> LayerValues:
        """Returns them by other names, for those that have one."""
        choices = {choice: names.get(value, value) for choice, value in self.choices.items()}
        x, y = (names.get(name, name) for name in (self.input, self.output))
        return LayerValues(x, y, choices)


def selected_values(values: Mapping[str, LayerValues]) -> dict[str, str]:
    """Returns the names of the values that hold what was chosen, of the layers that choose."""
    return {key: name for layer in values.values() for key, name in layer.choices.items()}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph for a target, and its layers' values by layer name."""

    model: ir.Model
    values: Mapping[str, LayerValues]


Observer = Callable[[Builder], Sequence[ir.Value]]
"""Adds nodes that look at a layer's `Builder.taps` and returns what they see."""


def lower(
    traced: ir.Model,
    requests: Mapping[str, LoweringRequest],
    observer: Observer | None = None,
    *,
    fp16_weights: bool = False,
) -> Lowered:
    """Returns a copy of a traced model in which every MoE node is replaced as requested.

    The traced model is left as it is, and its tensors are shared, not copied. With an `observer`,
    what it returns for each layer becomes further outputs of the graph. With `fp16_weights` FP16 is
    what weights are stored in alone (`precision.fp16_weights`).
    """
    model = traced.clone()
    layers = [request.layer for request in requests.values()]
    steer = _add_steer_input(model, layers)
    k_input = _add_k_input(model, layers)
    values: dict[str, LayerValues] = {}
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        name = node.attributes.get_string("layer")
        layer = requests[name].layer
        layer = layer if layer.k is not None else replace(layer, k=k_input)
        values[name] = _replace(model.graph, node, requests[name].lowering, layer, steer, observer)
    missing = requests.keys() - values.keys()
    if missing:
        raise LoweringError(
            f"the traced graph does not hold the layer {', '.join(sorted(missing))}",
            hint="the layer is part of the model but not of its forward pass on these inputs",
        )
    model.opset_imports.pop(DOMAIN, None)
    if fp16_weights:
        names = compute_in_fp32(model)
        values = {name: layer.renamed(names) for name, layer in values.items()}
    simplify(model)
    model.ir_version = min(model.ir_version, _lowest_ir_version(model.opset_imports[""]))
    return Lowered(model, values)


def _lowest_ir_version(opset: int) -> int:
    """The oldest form of the file that has an opset, which the oldest runtimes load."""
    return max(9, (opset - 1) // 2 if opset < 24 else opset // 2)


def _add_k_input(model: ir.Model, layers: Sequence[LayerOf[Any]]) -> ir.Value | None:
    if all(layer.k is not None for layer in layers):
        return None
    value = ir.Value(name=K_INPUT, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs.append(value)
    return value


def _add_steer_input(model: ir.Model, layers: Sequence[LayerOf[Any]]) -> ir.Value | None:
    """The strengths [b, s] of steerings that are given per run; None where no layer has any."""
    for layer in layers:
        if layer.tensors.has(STEER_CENTRES):
            centres, _ = layer.tensors.stacked(STEER_CENTRES).shape.numpy()
            first = model.graph.inputs[0].shape
            shape = ir.Shape([None if first is None else first[0], centres])
            kind = ir.TensorType(ir.DataType.FLOAT)
            value = ir.Value(name=STEER_INPUT, shape=shape, type=kind)
            model.graph.inputs.append(value)
            return value
    return None


def _steered(b: Builder, layer: LayerOf[Any], x: ir.Value, strengths: ir.Value | None) -> ir.Value:
    """Adds the experts' cluster centres to tokens x [b, m, d], each times its strength."""
    single = ir.DataType.FLOAT
    if layer.tensors.has(STEER_CENTRES):
        assert strengths is not None
        centres = layer.stacked(b, STEER_CENTRES)
        moved = b.op("MatMul", strengths, centres, name="steer/moved")  # [b, d]
        moved = b.op("Unsqueeze", moved, b.ints(1), name="steer/for_tokens")
    else:
        moved = layer.stacked(b, STEER_INPUT)
    x = b.cast(x, layer.x_type, single, "steer/tokens_fp32")
    return b.op("Add", x, moved, name="steer/steered")


def _replace(
    graph: ir.Graph,
    node: ir.Node,
    lowering: AnyLowering,
    layer: LayerOf[Any],
    steer: ir.Value | None,
    observer: Observer | None,
) -> LayerValues:
    (x, *others), old = node.inputs, node.outputs[0]
    routed = tuple(value for value in others if value is not None)
    assert x is not None and x.name is not None
    tokens = x.shape[1] if x.shape is not None and not layer.spec.flat else None
    layer = replace(
        layer,
        tokens=tokens if isinstance(tokens, int) else None,
        x_type=x.dtype or ir.DataType.FLOAT,
        y_type=old.dtype or ir.DataType.FLOAT,
        routed=routed,
    )
    b = Builder(layer.spec.name)
    seen = x
    if any(layer.tensors.has(name) for name in (STEER_INPUT, STEER_CENTRES)):
        seen = _steered(b, layer, x, steer)
        layer = replace(layer, x_type=ir.DataType.FLOAT)
    y = lowering.build(b, layer, seen)
    if observer is not None:
        graph.outputs.extend(observer(b))
    y.shape, y.type = old.shape, old.type
    if old in graph.outputs:
        y.name = old.name  # the graph's own outputs keep their names
    b.insert_before(graph, node)
    ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    for used in b.nodes:
        _count_domain(graph, used)
    assert y.name is not None
    return LayerValues(
        input=x.name,
        output=y.name,
        choices=_chosen(layer) if layer.selects else {},
    )


def _chosen(layer: LayerOf[Any]) -> dict[str, str]:
    """Names of the values that hold what a layer chose, or what was chosen for it."""
    name = layer.spec.name
    if layer.spec.flat:
        index = layer.routed[0].name
        assert index is not None
        return {choice_key(name, key): index for key in layer.spec.choices()}
    return {
        choice_key(name, key): in_layer(name, value) for key, value in layer.spec.choices().items()
    }


def _count_domain(graph: ir.Graph, node: ir.Node) -> None:
    """Declares the opset of a node's domain, and of those in its branches, if none did yet."""
    if node.domain:
        graph.opset_imports.setdefault(node.domain, 1)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                _count_domain(graph, inner)
