"""Removes casts from masks and indices that PyTorch computes as numbers.

PyTorch multiplies ones and zeros by a large number; in 16 bits, each step has a cast.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from ..builder import Builder
from .patterns import integers_in, made, name_of, number_in, orders, put

HIDES = -2.0
"""Masks add a number below this to masked scores."""


def fuse_mask(graph: ir.Graph, product: ir.Node) -> bool:
    """Replaces a bool times a number by a Where; returns whether it matched."""
    for value, factor in orders(product.inputs):
        cast, number = made(value, "Cast"), number_in(factor)
        if cast is None or number is None or not math.isfinite(number) or factor is None:
            continue
        condition = cast.inputs[0]
        if condition is None or condition.dtype != ir.DataType.BOOL or condition.shape is None:
            continue
        if factor.shape is None or len(factor.shape) > len(condition.shape):
            continue
        b = Builder(f"{name_of(product)}/mask")
        opposite, zero = made(condition, "Not"), b.number(0.0)
        if opposite is None:
            y = b.op("Where", condition, factor, zero, name="chosen")
        else:
            y = b.op("Where", opposite.inputs[0], zero, factor, name="chosen")
        put(graph, b, product, product.outputs[0], y)
        return True
    return False


def fuse_none_seen(graph: ir.Graph, less: ir.Node) -> bool:
    """Derives the tokens that attend to no token from the existing mask of numbers.

    PyTorch counts the unmasked scores of each token; returns whether that pattern matched.
    """
    counted, least = made(less.inputs[0], "ReduceSum"), number_in(less.inputs[1])
    cast = None if counted is None else made(counted.inputs[0], "Cast")
    mask = None if cast is None else cast.inputs[0]
    if counted is None or mask is None or mask.dtype != ir.DataType.BOOL or len(counted.inputs) < 2:
        return False
    axes = integers_in(counted.inputs[1])
    if least is None or not 0 < least <= 1 or axes is None:
        return False
    for node, _ in mask.uses():
        hides = number_in(node.inputs[2]) if node.op_type == "Where" else None
        if hides is None or hides >= HIDES or number_in(node.inputs[1]) != 0:
            continue
        b = Builder(f"{name_of(less)}/none_seen")
        keep = counted.attributes.get_int("keepdims", 1)
        highest = b.op("ReduceMax", node.outputs[0], b.ints(*axes), keepdims=keep, name="highest")
        highest.shape, highest.type = counted.outputs[0].shape, node.outputs[0].type
        y = b.op("Less", highest, b.number(HIDES / 2), name="hidden")
        put(graph, b, less, less.outputs[0], y)
        return True
    return False


def fuse_zero(graph: ir.Graph, opposite: ir.Node) -> bool:
    """Replaces the negation of a number as a bool by a comparison; returns whether it matched."""
    cast = made(opposite.inputs[0], "Cast")
    x = None if cast is None else cast.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT:
        return False
    b = Builder(f"{name_of(opposite)}/zero")
    y = b.op("Equal", x, b.number(0.0), name="is_zero")
    put(graph, b, opposite, opposite.outputs[0], y)
    return True


def fuse_cast(graph: ir.Graph, cast: ir.Node) -> bool:
    """Removes an index's casts to and fro, or a constant's cast; returns whether it matched."""
    y, wanted = cast.outputs[0], cast.attributes.get_int("to", 0)
    inner = made(cast.inputs[0], "Cast")
    x = None if inner is None else inner.inputs[0]
    if x is not None and wanted == ir.DataType.INT64 and made(x, "TopK") is not None:
        if x.dtype != ir.DataType.INT64 or y.is_graph_output():
            return False
        ir.convenience.replace_all_uses_with(y, x)
        return True
    spread = made(cast.inputs[0], "Expand")
    constant = None if spread is None else spread.inputs[0]
    tensor = None if constant is None else constant.const_value
    if spread is None or tensor is None or tensor.size != 1 or wanted != ir.DataType.BOOL:
        return False
    b = Builder(f"{name_of(cast)}/constant")
    value = b.constant(tensor.numpy() != 0)
    put(graph, b, cast, y, b.op("Expand", value, spread.inputs[1], name="spread"))
    return True
