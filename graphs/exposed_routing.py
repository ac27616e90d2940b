"""Adds the layers' choices and scores as outputs of a graph; imported only if requested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .lower import Lowered
from .lowerings.base import AnyPlan
from .names import GATES, K_INPUT, SELECTED


def expose_routing(lowered: Lowered, layers: Sequence[AnyPlan]) -> Lowered:
    """Adds each layer's choice as an output of the graph, and records the outputs' names.

    A Soft MoE layer outputs the experts of an input [b, k], a token-routed layer those of its
    tokens [b, m, k], and a muMoE layer the coefficients of each level [b, m, n]. The scores of the
    layer follow.
    """
    graph, values = lowered.model.graph, dict(lowered.values)
    by_name = {value.name: value for node in graph for value in node.outputs}
    by_name |= {value.name: value for value in graph.inputs}
    first = graph.inputs[0].shape
    for layer in layers:
        spec, layer_values = layer.spec, values[layer.name]
        shape, k = by_name[layer_values.input].shape, K_INPUT if layer.k is None else layer.k
        assert shape is not None and first is not None
        choices: dict[str, str] = {}
        scores = [by_name[score] for score in layer_values.scores]
        for level, (choice, name) in enumerate(layer_values.choices.items()):
            value, dtype = by_name[name], ir.DataType.INT64
            if spec.chooses_sets:
                sizes = [shape[0], k]
            elif spec.rewritable:
                dtype, sizes = ir.DataType.FLOAT, [*shape[:2], spec.levels[level]]
            else:
                value = _split_by_input(graph, layer.name, value, SELECTED)
                sizes = [first[0], "tokens", k]
            value.type, value.shape = ir.TensorType(dtype), ir.Shape(sizes)
            graph.outputs.append(value)
            choices[choice] = str(value.name)
        for score in scores:
            graph.outputs.remove(score)
            output = score
            if spec.flat:
                output = _split_by_input(graph, layer.name, score, GATES)
                output.type = ir.TensorType(ir.DataType.FLOAT)
                output.shape = ir.Shape([first[0], "tokens", k])
            graph.outputs.append(output)
        values[layer.name] = replace(layer_values, choices=choices)
    return replace(lowered, values=values)


def _split_by_input(graph: ir.Graph, layer: str, rows: ir.Value, name: str) -> ir.Value:
    """Reshapes choices or scores per token, [b·m, k], to [b, m, k], with the batch first."""
    # A separate builder names these constants, because the layer's own nodes have the same.
    b = Builder(layer)
    tokens = b.weight(ir.tensor(np.array([-1])), f"{layer}/{name}/tokens")
    batch = b.op("Shape", graph.inputs[0], start=0, end=1, name=f"{name}/batch")
    last = b.op("Shape", rows, start=-1, name=f"{name}/k")
    shape = b.op("Concat", batch, tokens, last, axis=0, name=f"{name}/shape")
    result = b.op("Reshape", rows, shape, name=name)
    for initializer in b.initializers:
        graph.register_initializer(initializer)
    graph.extend(b.nodes)
    return result
