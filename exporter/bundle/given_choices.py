"""A graph that gets its layers' choices of experts as inputs, to compare the outputs after them.

Rounding may swap two experts with nearly equal scores. In a network with attention, all later
tokens then differ as well. With PyTorch's choices as inputs, every output can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from onnx import GraphProto, TensorProto, helper


def given_choice(value: str) -> str:
    """Returns the name of the input that replaces a choice."""
    return f"{value}/given"


def own_choice(value: str) -> str:
    """Returns the name of the choice that the graph itself would make."""
    return f"{value}/own"


def scores_of(value: str) -> tuple[str, str]:
    """Returns the names of the scores of the graph's own choice, and of the given one, in FP32."""
    return f"{value}/own_scores", f"{value}/given_scores"


def can_be_given(graph: GraphProto, values: Iterable[str]) -> bool:
    """Whether each choice consists of the indices that a TopK returns."""
    return {*values} <= {node.output[1] for node in graph.node if node.op_type == "TopK"}


def with_given_choices(graph: GraphProto, values: Collection[str]) -> None:
    """Makes choices (`can_be_given`) inputs of a graph, int64 [s, m, k], where m may be 1.

    The scores that TopK returns become those of the given experts. Both are in the order in which
    TopK returns its own, because the rest of the graph may depend on it.
    """
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "TopK" or node.output[1] not in values:
            continue
        (all_scores, k), (scores, value) = node.input, node.output
        given, own = given_choice(value), own_choice(value)
        own_scores, given_scores = scores_of(value)
        names = ("shape", "sets", "sets/scores", "order")
        shape, sets, found, order = (f"{value}/{name}" for name in names)
        node.output[:] = [f"{value}/top", own]
        settings = {each.name: each.i for each in node.attribute}
        gather = partial(helper.make_node, "GatherElements", axis=settings.get("axis", -1))
        cast = partial(helper.make_node, "Cast", to=TensorProto.FLOAT)
        graph.input.append(helper.make_tensor_value_info(given, TensorProto.INT64, [None] * 3))
        nodes += [
            helper.make_node("Shape", [own], [shape]),
            helper.make_node("Reshape", [given, shape], [sets]),
            gather([all_scores, sets], [found]),
            helper.make_node("TopK", [found, k], [scores, order], **settings),
            gather([sets, order], [value]),
            cast([node.output[0]], [own_scores]),
            cast([found], [given_scores]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
