"""A 16-bit graph as one in FP32 that rounds as it does, for CPUs without its kernels."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, shape_inference

HALF_TYPES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})


def fp16_emulation(model: ModelProto) -> ModelProto:
    """Returns a graph with FP32 kernels that rounds like a 16-bit one.

    Its weights stay where they are, and its inputs and outputs are FP32.
    """
    inferred = shape_inference.infer_shapes(model, strict_mode=False)
    types = {
        value.name: value.type.tensor_type.elem_type
        for graph in _graphs(inferred.graph)
        for value in (*graph.value_info, *graph.output, *graph.input)
    }
    stored = {tensor.name: tensor.data_type for tensor in inferred.graph.initializer}
    halves = {name: kind for name, kind in (types | stored).items() if kind in HALF_TYPES}
    for graph in _graphs(inferred.graph):
        _round(graph, halves)
    main = inferred.graph
    for value in (*main.input, *main.output):
        if value.name in halves:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    weights = []
    for tensor in main.initializer:
        if tensor.data_type in HALF_TYPES:
            name, tensor.name = tensor.name, f"{tensor.name}/stored"
            weights.append(_cast(tensor.name, name, TensorProto.FLOAT))
    nodes = [*weights, *main.node]
    del main.node[:]
    main.node.extend(nodes)
    return inferred


def _round(graph: GraphProto, halves: dict[str, int]) -> None:
    """Lets every node of a graph that makes a 16-bit value make an FP32 one, rounded."""
    nodes: list[NodeProto] = []
    for node in graph.node:
        made = [(index, name) for index, name in enumerate(node.output) if name in halves]
        if node.op_type == "Cast" and made:
            node.attribute[0].i = TensorProto.FLOAT
        nodes.append(node)
        for index, name in made:
            node.output[index] = f"{name}/exact"
            nodes.append(_cast(f"{name}/exact", f"{name}/rounded", halves[name]))
            nodes.append(_cast(f"{name}/rounded", name, TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]  # they tell the types from before
    for value in graph.output:
        if value.name in halves:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _cast(source: str, target: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"rounding/{target}", to=kind)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
