"""Replaces each MoE node of a traced graph with the nodes of its lowering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from ..errors import LoweringError
from .builder import Builder
from .layers.base import choice_key
from .layers.stored import Layer
from .names import DOMAIN, K_INPUT, STEER_CENTRES, STEER_INPUT, in_layer


def simplify(model: ir.Model) -> None:
    """Removes identities, dead nodes, unused weights, duplicate constants and metadata, in place.

    PyTorch's exporter writes stack traces with local paths into the metadata.
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
        _separate_outputs(graph)
    for graph in model.graphs():  # the passes keep the metadata of values
        outputs = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *outputs):
            value.metadata_props.clear()


def _separate_outputs(graph: ir.Graph) -> None:
    """Gives each output of a subgraph its own node, in place.

    A branch may not return a value from outside, and no graph may return a value twice; removing
    identities can lead to either.
    """
    returned: set[ir.Value | None] = {None}
    for index, value in enumerate(graph.outputs):
        node = value.producer()
        outside = (node is None or node.graph is not graph) and value not in graph.inputs
        if outside or value in returned:
            copy = ir.node("Identity", [value])
            copied = copy.outputs[0]
            copied.name = f"{value.name}/returned_{index}"
            copied.shape, copied.type = value.shape, value.type
            graph.append(copy)
            graph.outputs[index] = copied
        returned.add(value)


@dataclass(frozen=True, slots=True)
class LayerValues:
    """Names of the values around a lowered layer, to locate where two graphs diverge.

    `choices` maps a `choice_key` to each value with a choice of the layer; it is empty if every
    expert is kept. `scores` are the layer's score outputs.
    """

    input: str
    output: str
    choices: Mapping[str, str]
    scores: Sequence[str] = ()

    @property
    def selected(self) -> str | None:
        return next(iter(self.choices.values()), None)

    def renamed(self, names: Mapping[str, str]) -> LayerValues:
        """Returns a copy with the given values renamed."""
        choices = {choice: names.get(value, value) for choice, value in self.choices.items()}
        x, y, *scores = (names.get(name, name) for name in (self.input, self.output, *self.scores))
        return LayerValues(x, y, choices, scores)


def selected_values(values: Mapping[str, LayerValues]) -> dict[str, str]:
    """Returns the names of the values with the choices, for the layers that choose."""
    return {key: name for layer in values.values() for key, name in layer.choices.items()}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph for a target, and its layers' values by layer name."""

    model: ir.Model
    values: Mapping[str, LayerValues]


Observer = Callable[[Builder], Sequence[ir.Value]]
"""Adds nodes that reduce a layer's `Builder.taps`, and returns their outputs."""


def lower(
    traced: ir.Model,
    layers: Mapping[str, Layer[Any]],
    observer: Observer | None = None,
    *,
    fp16_weights: bool = False,
    coefficients: bool = False,
) -> Lowered:
    """Returns a copy of a traced model in which each MoE node is replaced with its lowering.

    The traced model stays unchanged; its tensors are shared, not copied. The values that an
    `observer` returns for a layer become outputs of the graph. With `fp16_weights`, FP16 applies to
    stored weights only (`precision.fp16_weights`). With `coefficients`, the values also name the
    coefficients of layers that keep all of them. The layers' scores become outputs: [b·m, k], with
    one row per token, if the router is outside the layer.
    """
    model = traced.clone()
    steer = _add_steer_input(model, [*layers.values()])
    k_input = None
    if any(layer.k is None for layer in layers.values()):
        k_input = ir.Value(name=K_INPUT, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
        model.graph.inputs.append(k_input)
    values: dict[str, LayerValues] = {}
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        name = node.attributes.get_string("layer")
        layer = layers[name]
        layer = layer if layer.k is not None else replace(layer, k=k_input)
        values[name] = _lower_node(model.graph, node, layer, steer, observer)
        if coefficients and layer.spec.rewritable:
            values[name] = replace(values[name], choices=_choice_names(layer))
    missing = layers.keys() - values.keys()
    if missing:
        raise LoweringError(
            f"the traced graph does not contain the layer {', '.join(sorted(missing))}",
            hint="the layer is part of the model, but not of its forward pass on these inputs",
        )
    model.opset_imports.pop(DOMAIN, None)
    if fp16_weights:
        from .precision.fp16_weights import compute_in_fp32  # needed for this precision only

        names = compute_in_fp32(model)
        values = {name: layer.renamed(names) for name, layer in values.items()}
    simplify(model)
    opset = model.opset_imports[""]
    # The oldest IR version that allows the opset, so that old runtimes load the file.
    oldest = max(9, (opset - 1) // 2 if opset < 24 else opset // 2)
    model.ir_version = min(model.ir_version, oldest)
    return Lowered(model, values)


def _add_steer_input(model: ir.Model, layers: Sequence[Layer[Any]]) -> ir.Value | None:
    """Returns the input with the strengths [b, s] of steerings at run time, or None."""
    for layer in layers:
        if layer.tensors.has(STEER_CENTRES):
            centres, _ = layer.tensors.stacked(STEER_CENTRES).shape.numpy()
            first = model.graph.inputs[0].shape
            shape = ir.Shape([None if first is None else first[0], centres])
            fp32 = ir.TensorType(ir.DataType.FLOAT)
            value = ir.Value(name=STEER_INPUT, shape=shape, type=fp32)
            model.graph.inputs.append(value)
            return value
    return None


def _steer(b: Builder, layer: Layer[Any], x: ir.Value, strengths: ir.Value | None) -> ir.Value:
    """Adds the experts' cluster centres, times their strengths, to tokens x [b, m, d]."""
    fp32 = ir.DataType.FLOAT
    if layer.tensors.has(STEER_CENTRES):
        assert strengths is not None
        centres = layer.stacked(b, STEER_CENTRES)
        offset = b.op("MatMul", strengths, centres, name="steer/moved")  # [b, d]
        offset = b.op("Unsqueeze", offset, b.ints(1), name="steer/for_tokens")
    else:
        offset = layer.stacked(b, STEER_INPUT)
    x = b.cast(x, layer.x_type, fp32, "steer/tokens_fp32")
    return b.op("Add", x, offset, name="steer/steered")


def _lower_node(
    graph: ir.Graph,
    node: ir.Node,
    layer: Layer[Any],
    steer: ir.Value | None,
    observer: Observer | None,
) -> LayerValues:
    """Replaces a MoE node with its lowering, in place; returns the names of values around it."""
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
    steered = x
    if any(layer.tensors.has(name) for name in (STEER_INPUT, STEER_CENTRES)):
        steered = _steer(b, layer, x, steer)
        layer = replace(layer, x_type=ir.DataType.FLOAT)
    y = layer.build(b, layer, steered)
    scores: Sequence[ir.Value] = ()
    if layer.scores:
        from .scores import score_outputs

        scores = score_outputs(b, layer, x)
    graph.outputs.extend(scores)
    if observer is not None:
        graph.outputs.extend(observer(b))
    y.shape, y.type = old.shape, old.type
    if old in graph.outputs:
        y.name = old.name  # the graph's outputs keep their names
    b.insert_before(graph, node)
    ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    for new_node in b.nodes:
        _declare_domains(graph, new_node)
    assert y.name is not None
    return LayerValues(
        input=x.name,
        output=y.name,
        choices=_choice_names(layer) if layer.selects or (layer.scores and layer.spec.flat) else {},
        scores=[str(value.name) for value in scores],
    )


def _choice_names(layer: Layer[Any]) -> dict[str, str]:
    """Returns the names of the values with a layer's choices, made inside or outside the layer."""
    name = layer.spec.name
    if layer.spec.flat:
        index = layer.routed[0].name
        assert index is not None
        return {choice_key(name, key): index for key in layer.spec.choices()}
    return {
        choice_key(name, key): in_layer(name, value) for key, value in layer.spec.choices().items()
    }


def _declare_domains(graph: ir.Graph, node: ir.Node) -> None:
    """Declares the opset of each domain in a node and its branches, unless already declared."""
    if node.domain:
        graph.opset_imports.setdefault(node.domain, 1)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                _declare_domains(graph, inner)
