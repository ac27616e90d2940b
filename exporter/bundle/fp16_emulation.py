"""Emulates a 16-bit graph with FP32 kernels that round, for CPUs without 16-bit kernels."""

from __future__ import annotations

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, shape_inference

from .manifest import graphs_in, nodes_in

HALF_TYPES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})


def fp16_emulation(model: ModelProto) -> ModelProto:
    """Returns a graph with FP32 kernels that rounds like the 16-bit one.

    Its weights stay in place, and its inputs and outputs are FP32.
    """
    inferred = shape_inference.infer_shapes(model, strict_mode=False)
    types = {
        value.name: value.type.tensor_type.elem_type
        for graph in graphs_in(inferred.graph)
        for value in (*graph.value_info, *graph.output, *graph.input)
    }
    stored = {tensor.name: tensor.data_type for tensor in inferred.graph.initializer}
    halves = {name: kind for name, kind in (types | stored).items() if kind in HALF_TYPES}
    for graph in graphs_in(inferred.graph):
        _round(graph, halves, halves.keys() & stored.keys())
    main = inferred.graph
    for value in (*main.input, *main.output):
        if value.name in halves:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    read = {name for node in nodes_in(main) for name in node.input}
    read |= {value.name for value in main.output}
    weights = []
    for tensor in main.initializer:
        if tensor.data_type in HALF_TYPES:
            name, tensor.name = tensor.name, f"{tensor.name}/stored"
            if name in read:
                weights.append(_cast(tensor.name, name, TensorProto.FLOAT))
    nodes = [*weights, *main.node]
    del main.node[:]
    main.node.extend(nodes)
    return inferred


def _round(graph: GraphProto, halves: dict[str, int], weights: set[str]) -> None:
    """Makes every node with a 16-bit output compute in FP32, and rounds the output.

    A Gather that selects a few of many weights reads them as stored; they need no rounding.
    """
    nodes: list[NodeProto] = []
    for node in graph.node:
        rounded = [(index, name) for index, name in enumerate(node.output) if name in halves]
        if node.op_type == "Cast" and rounded:
            node.attribute[0].i = TensorProto.FLOAT
        nodes.append(node)
        if node.op_type == "Gather" and not node.domain and node.input[0] in weights:
            name, node.output[0] = node.output[0], f"{node.output[0]}/stored"
            node.input[0] = f"{node.input[0]}/stored"
            nodes.append(_cast(node.output[0], name, TensorProto.FLOAT))
            continue
        for index, name in rounded:
            node.output[index] = f"{name}/exact"
            nodes.append(_cast(f"{name}/exact", f"{name}/rounded", halves[name]))
            nodes.append(_cast(f"{name}/rounded", name, TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]  # these have the old types
    for value in graph.output:
        if value.name in halves:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _cast(source: str, target: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"rounding/{target}", to=kind)
