"""What a fusion looks for: nodes of a type, what they read, and the axes that they move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

HEADS_FIRST = [0, 2, 1, 3]
"""From [b, m, heads, w] to [b, heads, m, w], and back."""


TOKENS_LAST = [0, 2, 3, 1]
"""From [b, m, heads, w] to [b, heads, w, m]."""


def made(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node of one of these types that made a value."""
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type in op_types else None


def permutes(transpose: ir.Node, axes: Sequence[int]) -> bool:
    """Whether a transpose moves the axes so."""
    return list(transpose.attributes.get_ints("perm", ())) == list(axes)


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The one node that reads a value, if it is of this type."""
    users = [node for node, _ in value.uses()]
    if len(users) != 1 or value.is_graph_output():
        return None
    return users[0] if not users[0].domain and users[0].op_type == op_type else None


def orders(
    inputs: Sequence[ir.Value | None],
) -> Iterator[tuple[ir.Value | None, ir.Value | None]]:
    """The two inputs of a node for which their order does not count."""
    if len(inputs) == 2:
        yield inputs[0], inputs[1]
        yield inputs[1], inputs[0]


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other input of a node with two."""
    return next((other for one, other in orders(node.inputs) if one is value), None)


def number_in(value: ir.Value | None) -> float | None:
    """A constant scalar."""
    tensor = None if value is None else value.const_value
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def integers_in(value: ir.Value | None) -> list[int] | None:
    """A constant vector."""
    tensor = None if value is None else value.const_value
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


def unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """A value without the constant that it is multiplied with, and that constant."""
    node = made(value, "Mul", "Div")
    if node is not None and node.op_type == "Div":
        divisor = number_in(node.inputs[1])
        return (node.inputs[0], 1 / divisor) if divisor else (value, 1.0)
    if node is not None:
        for x, factor in orders(node.inputs):
            number = number_in(factor)
            if number is not None:
                return x, number
    return value, 1.0


def span(node: ir.Node, width: int) -> tuple[int, int] | None:
    """From where to where a slice of the last axis goes."""
    start, end, axis, *step = (integers_in(value) for value in node.inputs[1:])
    if not start or not end or axis not in ([3], [-1]) or step not in ([], [[1]]):
        return None
    return start[0], min(end[0], width)


def flat_before(value: ir.Value | None) -> ir.Value | None:
    """What [b, heads, m, w] was before its heads were taken apart, [b, m, heads·w]."""
    turned = made(value, "Transpose")
    if turned is None or not permutes(turned, HEADS_FIRST):
        return None
    apart = made(turned.inputs[0], "Reshape")
    x = None if apart is None else apart.inputs[0]
    return x if apart is not None and joins_heads(x, apart.outputs[0]) else None


def joins_heads(flat: ir.Value | None, apart: ir.Value) -> bool:
    """Whether a value [b, m, heads·w] is another's [b, m, heads, w]."""
    if flat is None or flat.shape is None or apart.shape is None or len(apart.shape) != 4:
        return False
    b, m, heads, width = apart.shape
    if not isinstance(heads, int) or not isinstance(width, int):
        return False
    return list(flat.shape) == [b, m, heads * width]


def width_of(value: ir.Value) -> int | ir.SymbolicDim:
    """The width w of a value [b, heads, m, w]."""
    assert value.shape is not None
    return value.shape[3]


def heads_of(value: ir.Value) -> int:
    """The heads of a value [b, heads, m, w]; 0 where they are not known."""
    if value.shape is None or len(value.shape) != 4:
        return 0
    heads = value.shape[1]
    return heads if isinstance(heads, int) else 0


def name_of(node: ir.Node) -> str:
    assert node.name is not None
    return node.name
