"""A graph that gets its layers' choices of experts as inputs, to compare the outputs after them.

Rounding may swap two experts with nearly equal scores. In a network with attention, all later
tokens then differ as well. With PyTorch's choices as inputs, every output can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import GraphProto, NodeProto, TensorProto, helper


def given_choice(value: str) -> str:
    """Returns the name of the input that replaces a choice."""
    return f"{value}/given"


def own_choice(value: str) -> str:
    """Returns the name of the choice that the graph itself would make."""
    return f"{value}/own"


def can_be_given(graph: GraphProto, values: Iterable[str]) -> bool:
    """Whether each choice consists of the indices that a TopK over the last axis returns."""
    return {*values} <= {node.output[1] for node in graph.node if _is_choice(node)}


def with_given_choices(graph: GraphProto, values: Collection[str]) -> None:
    """Makes choices (`can_be_given`) inputs of a graph, int64 [s, m, k].

    The scores that TopK returns become those of the given experts.
    """
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if not _is_choice(node) or node.output[1] not in values:
            continue
        scores, value = node.output
        own, given, shape = own_choice(value), given_choice(value), f"{value}/shape"
        node.output[:] = [f"{value}/scores", own]
        graph.input.append(helper.make_tensor_value_info(given, TensorProto.INT64, [None] * 3))
        nodes.append(helper.make_node("Shape", [own], [shape]))
        nodes.append(helper.make_node("Reshape", [given, shape], [value]))
        nodes.append(helper.make_node("GatherElements", [node.input[0], value], [scores], axis=-1))
    del graph.node[:]
    graph.node.extend(nodes)


def _is_choice(node: NodeProto) -> bool:
    axes = [attribute.i for attribute in node.attribute if attribute.name == "axis"]
    return node.op_type == "TopK" and axes in ([], [-1])
