"""Makes a 16-bit graph compute in FP32 on CPUs: only its weights are stored in FP16.

ONNX Runtime inserts casts to compute FP16 in FP32 on CPUs without FP16 arithmetic. On CPUs with
such arithmetic, for example recent ARM CPUs, it sums products in FP16: ten times the error, and NaN
above 65504. A graph that casts its weights itself has the same results on all CPUs, and is the
graph that the runtime would create on x86.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16

MOVES = frozenset(
    {
        *("Gather", "GatherND", "GatherElements", "Reshape", "Transpose", "Squeeze", "Unsqueeze"),
        *("Slice", "Split", "Expand", "Flatten", "Identity", "Concat"),
    }
)
"""Ops that only move values. Weights are cast after them, because they may select few of many."""

SMALL = 512
"""Constants with at most this many numbers stay in FP32, because a cast would save nothing."""


def compute_in_fp32(model: ir.Model) -> dict[str, str]:
    """Makes all ops of a lowered FP16 graph compute in FP32, in place.

    Its inputs and outputs keep their types. Returns the new names of values that lost theirs when a
    cast between two ops was removed.
    """
    widening = _Widening(_types(model))
    widening.widen_graph(model.graph, model.graph)
    names = widening.names
    return {old: _final_name(names, new) for old, new in names.items()}


def _types(model: ir.Model) -> dict[str, ir.DataType]:
    """Returns the types of all values as ONNX infers them."""
    typed = model.clone()
    common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(typed)
    return {
        value.name: value.dtype
        for graph in typed.graphs()
        for node in graph
        for value in (*node.inputs, *node.outputs)
        if value is not None and value.name and value.dtype is not None
    }


class _Widening:
    """The state of one pass; `names` maps the names of dropped values to their replacements."""

    def __init__(self, types: dict[str, ir.DataType]) -> None:
        self.names: dict[str, str] = {}
        self._types = types
        self._half: set[ir.Value] = set()
        self._casts: dict[tuple[ir.Value, ir.Graph], ir.Value] = {}

    def widen_graph(self, graph: ir.Graph, main: ir.Graph) -> None:
        """Widens the main graph, or that of a branch."""
        halves = [v for v in graph.outputs if v.dtype == HALF]
        self._half |= {v for v in graph.initializers.values() if v.dtype == HALF}
        for value in graph.inputs:
            if value.dtype == HALF and graph is main:
                self._half.add(value)
            elif value.dtype == HALF:
                value.type = ir.TensorType(FLOAT)
        for node in list(graph):
            self._widen_node(node, graph, main)
        for index, value in enumerate(list(graph.outputs)):
            if graph is not main and value in self._half:
                graph.outputs[index] = self._widened(value, graph, None)
            elif graph is main and value in halves and value not in self._half:
                name = str(value.name)
                self.names[name] = value.name = f"{name}/wide"
                value.type = ir.TensorType(FLOAT)
                graph.outputs[index] = add_cast(graph, None, value, HALF, name)

    def _widen_node(self, node: ir.Node, graph: ir.Graph, main: ir.Graph) -> None:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                self.widen_graph(attribute.as_graph(), main)
        if self._moves(node):
            self._half |= {*node.outputs}
            return
        for index, value in enumerate(node.inputs):
            if value in self._half:
                assert value is not None
                node.replace_input_with(index, self._widened(value, graph, node))
        for name, attribute in list(node.attributes.items()):
            if name in ("to", "dtype") and attribute.value == HALF.value:
                node.attributes[name] = ir.AttrInt64(name, FLOAT.value)
            elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == HALF:
                wide = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
                node.attributes[name] = ir.AttrTensor(name, wide)
        for value in node.outputs:
            if value.dtype == HALF:
                value.type = ir.TensorType(FLOAT)
        if node.op_type == "Cast" and node.attributes.get_int("to") == FLOAT.value:
            self._drop_cast(node, graph)

    def _moves(self, node: ir.Node) -> bool:
        if node.domain or node.op_type not in MOVES or node.inputs[0] not in self._half:
            return False
        return node.op_type != "Concat" or all(value in self._half for value in node.inputs)

    def _drop_cast(self, cast: ir.Node, graph: ir.Graph) -> None:
        (value,), (output,) = cast.inputs, cast.outputs
        assert value is not None and value.name is not None and output.name is not None
        if value.dtype != FLOAT and self._types.get(value.name) not in (FLOAT, HALF):
            return
        if output in graph.outputs:
            if value.producer() is None or value.graph is not graph or value in graph.outputs:
                return
            self.names[value.name] = value.name = output.name
        else:
            self.names[output.name] = value.name
        value.type, value.shape = ir.TensorType(FLOAT), value.shape or output.shape
        ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
        graph.remove(cast, safe=True)

    def _widened(self, value: ir.Value, graph: ir.Graph, user: ir.Node | None) -> ir.Value:
        """Returns an FP16 value in FP32: a constant, or one cast for all its users in a graph."""
        if value.is_initializer():
            assert value.graph is not None
            graph, user = value.graph, next(iter(value.graph), None)
        key = (value, graph)
        if key not in self._casts:
            name = f"{value.name}/fp32"
            tensor = value.const_value if value.is_initializer() else None
            if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.size > SMALL:
                self._casts[key] = add_cast(graph, user, value, FLOAT, name)
            else:
                wide = ir.tensor(tensor.numpy().astype(np.float32), name=name)
                constant = ir.Value(
                    name=name, shape=value.shape, type=ir.TensorType(FLOAT), const_value=wide
                )
                graph.register_initializer(constant)
                self._casts[key] = constant
        return self._casts[key]


def add_cast(
    graph: ir.Graph, user: ir.Node | None, value: ir.Value, target: ir.DataType, name: str
) -> ir.Value:
    """Adds a cast to a graph, before the node `user` or at the end."""
    output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(target))
    attributes = {"to": target.value}
    node = ir.node("Cast", [value], attributes=attributes, outputs=[output], name=f"{name}/Cast")
    if user is None:
        graph.append(node)
    else:
        graph.insert_before(user, node)
    return output


def _final_name(names: dict[str, str], name: str) -> str:
    while name in names:
        name = names[name]
    return name
