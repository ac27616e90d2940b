"""Helpers that recognise subgraphs, and replace them with other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from ..builder import Builder
from ..names import COMPUTED_BY, HIDDEN

HEADS_FIRST = [0, 2, 1, 3]
"""From [b, m, heads, w] to [b, heads, m, w], and back."""


TOKENS_LAST = [0, 2, 3, 1]
"""From [b, m, heads, w] to [b, heads, w, m]."""


def node_of(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Returns the node that computes a value, if its type is one of these."""
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type in op_types else None


def permutes(transpose: ir.Node, axes: Sequence[int]) -> bool:
    """Returns whether a transpose has these axes."""
    return list(transpose.attributes.get_ints("perm", ())) == list(axes)


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """Returns the only node that reads a value, if it has this type."""
    users = [node for node, _ in value.uses()]
    if len(users) != 1 or value.is_graph_output():
        return None
    return users[0] if not users[0].domain and users[0].op_type == op_type else None


def both_orders(
    inputs: Sequence[ir.Value | None],
) -> Iterator[tuple[ir.Value | None, ir.Value | None]]:
    """Yields the two inputs of a commutative node in both orders."""
    if len(inputs) == 2:
        yield inputs[0], inputs[1]
        yield inputs[1], inputs[0]


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """Returns the other input of a node with two inputs."""
    return next((other for first, other in both_orders(node.inputs) if first is value), None)


def number_in(value: ir.Value | None) -> float | None:
    tensor = None if value is None else value.const_value
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def integers_in(value: ir.Value | None) -> list[int] | None:
    tensor = None if value is None else value.const_value
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


def unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """Returns a value without its constant factor, and the factor."""
    node = node_of(value, "Mul", "Div")
    if node is not None and node.op_type == "Div":
        divisor = number_in(node.inputs[1])
        return (node.inputs[0], 1 / divisor) if divisor else (value, 1.0)
    if node is not None:
        for x, factor in both_orders(node.inputs):
            number = number_in(factor)
            if number is not None:
                return x, number
    return value, 1.0


def span(node: ir.Node, width: int) -> tuple[int, int] | None:
    """Returns the start and end of a slice along the last axis."""
    start, end, axis, *step = (integers_in(value) for value in node.inputs[1:])
    if not start or not end or axis not in ([3], [-1]) or step not in ([], [[1]]):
        return None
    return start[0], min(end[0], width)


def flat_before(value: ir.Value | None) -> ir.Value | None:
    """Returns the value [b, m, heads·w] that was split into heads [b, heads, m, w]."""
    transpose = node_of(value, "Transpose")
    if transpose is None or not permutes(transpose, HEADS_FIRST):
        return None
    reshape = node_of(transpose.inputs[0], "Reshape")
    x = None if reshape is None else reshape.inputs[0]
    return x if reshape is not None and joins_heads(x, reshape.outputs[0]) else None


def joins_heads(flat: ir.Value | None, split: ir.Value) -> bool:
    """Returns whether a value [b, m, heads·w] is the reshape of another [b, m, heads, w]."""
    if flat is None or flat.shape is None or split.shape is None or len(split.shape) != 4:
        return False
    b, m, heads, width = split.shape
    if not isinstance(heads, int) or not isinstance(width, int):
        return False
    return list(flat.shape) == [b, m, heads * width]


def width_of(value: ir.Value) -> int | ir.SymbolicDim:
    assert value.shape is not None
    return value.shape[3]


def heads_of(value: ir.Value) -> int:
    """Returns the number of heads in a value [b, heads, m, w]; 0 if it is unknown."""
    if value.shape is None or len(value.shape) != 4:
        return 0
    heads = value.shape[1]
    return heads if isinstance(heads, int) else 0


def name_of(node: ir.Node) -> str:
    assert node.name is not None
    return node.name


def replace_output(
    graph: ir.Graph,
    b: Builder,
    node: ir.Node,
    old: ir.Value,
    new: ir.Value,
    *,
    hidden: Sequence[ir.Value | None] = (),
) -> None:
    """Inserts nodes before the one whose output they replace; dead nodes are removed later.

    `hidden` are values that the last node computes internally.
    """
    new.shape, new.type = old.shape, old.type
    producer = new.producer()
    assert producer is not None
    before = [value.producer() for value in hidden if value is not None]
    producer.meta[HIDDEN] = tuple(node.name for node in before if node is not None)
    b.insert_before(graph, node)
    for inner in b.nodes:
        for value in inner.outputs:  # values other than floats already have their type
            value.type = value.type or old.type
    replace_value(graph, old, new)


def replace_value(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Replaces a value with another for all its users; the graph's outputs keep their names."""
    producer = old.producer()
    new.meta[COMPUTED_BY] = old.meta.get(COMPUTED_BY, None if producer is None else producer.name)
    if old in graph.outputs:
        new.name, old.name = old.name, None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
