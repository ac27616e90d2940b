"""A graph that gets its layers' choices of experts as inputs, to compare the outputs after them.

Rounding may swap two experts with nearly equal scores. In a network with attention, all later
tokens then differ as well. With PyTorch's choices as inputs, every output can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import GraphProto, TensorProto, helper


def given_choice(value: str) -> str:
    """Returns the name of the input that replaces a choice."""
    return f"{value}/given"


def own_choice(value: str) -> str:
    """Returns the name of the choice that the graph itself would make."""
    return f"{value}/own"


def can_be_given(graph: GraphProto, values: Iterable[str]) -> bool:
    """Whether each choice consists of the indices that a TopK returns."""
    return {*values} <= {node.output[1] for node in graph.node if node.op_type == "TopK"}


def with_given_choices(graph: GraphProto, values: Collection[str]) -> None:
    """Makes choices (`can_be_given`) inputs of a graph, int64 [s, m, k], where m may be 1.

    The scores that TopK returns become those of the given experts.
    """
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "TopK" or node.output[1] not in values:
            continue
        scores, value = node.output
        own, given, shape = own_choice(value), given_choice(value), f"{value}/shape"
        node.output[:] = [f"{value}/scores", own]
        graph.input.append(helper.make_tensor_value_info(given, TensorProto.INT64, [None] * 3))
        nodes.append(helper.make_node("Shape", [own], [shape]))
        nodes.append(helper.make_node("Reshape", [given, shape], [value]))
        axis = next((each.i for each in node.attribute if each.name == "axis"), -1)
        inputs = [node.input[0], value]
        nodes.append(helper.make_node("GatherElements", inputs, [scores], axis=axis))
    del graph.node[:]
    graph.node.extend(nodes)
