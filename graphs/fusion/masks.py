"""Removes casts from masks and indices that PyTorch computes as numbers.

PyTorch multiplies ones and zeros by a large number; in 16 bits, each step has a cast.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from ..builder import Builder
from .patterns import both_orders, integers_in, name_of, node_of, number_in, replace_output

MASKED_BELOW = -2.0
"""Masks add a number below this to masked scores."""


def fuse_mask(graph: ir.Graph, product: ir.Node) -> bool:
    """Replaces a bool times a number with a Where; returns whether it matched."""
    for value, factor in both_orders(product.inputs):
        cast, number = node_of(value, "Cast"), number_in(factor)
        if cast is None or number is None or not math.isfinite(number) or factor is None:
            continue
        condition = cast.inputs[0]
        if condition is None or condition.dtype != ir.DataType.BOOL or condition.shape is None:
            continue
        if factor.shape is None or len(factor.shape) > len(condition.shape):
            continue
        b = Builder(f"{name_of(product)}/mask")
        negation, zero = node_of(condition, "Not"), b.number(0.0)
        if negation is None:
            y = b.op("Where", condition, factor, zero, name="chosen")
        else:
            y = b.op("Where", negation.inputs[0], zero, factor, name="chosen")
        replace_output(graph, b, product, product.outputs[0], y)
        return True
    return False


def fuse_fully_masked(graph: ir.Graph, less: ir.Node) -> bool:
    """Derives the tokens that attend to no token from the existing numeric mask.

    PyTorch counts the unmasked scores of each token; returns whether that pattern matched.
    """
    count, threshold = node_of(less.inputs[0], "ReduceSum"), number_in(less.inputs[1])
    cast = None if count is None else node_of(count.inputs[0], "Cast")
    mask = None if cast is None else cast.inputs[0]
    if count is None or mask is None or mask.dtype != ir.DataType.BOOL or len(count.inputs) < 2:
        return False
    axes = integers_in(count.inputs[1])
    if threshold is None or not 0 < threshold <= 1 or axes is None:
        return False
    for node, _ in mask.uses():
        masked_value = number_in(node.inputs[2]) if node.op_type == "Where" else None
        if masked_value is None or masked_value >= MASKED_BELOW or number_in(node.inputs[1]) != 0:
            continue
        b = Builder(f"{name_of(less)}/none_seen")
        keep = count.attributes.get_int("keepdims", 1)
        highest = b.op("ReduceMax", node.outputs[0], b.ints(*axes), keepdims=keep, name="highest")
        highest.shape, highest.type = count.outputs[0].shape, node.outputs[0].type
        y = b.op("Less", highest, b.number(MASKED_BELOW / 2), name="hidden")
        replace_output(graph, b, less, less.outputs[0], y)
        return True
    return False


def fuse_zero(graph: ir.Graph, negation: ir.Node) -> bool:
    """Replaces Not(Cast(number)) with a comparison with zero; returns whether it matched."""
    cast = node_of(negation.inputs[0], "Cast")
    x = None if cast is None else cast.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT:
        return False
    b = Builder(f"{name_of(negation)}/zero")
    y = b.op("Equal", x, b.number(0.0), name="is_zero")
    replace_output(graph, b, negation, negation.outputs[0], y)
    return True


def fuse_cast(graph: ir.Graph, cast: ir.Node) -> bool:
    """Removes a pair of casts of an index, or a constant's cast; returns whether it matched."""
    y, target = cast.outputs[0], cast.attributes.get_int("to", 0)
    inner = node_of(cast.inputs[0], "Cast")
    x = None if inner is None else inner.inputs[0]
    if x is not None and target == ir.DataType.INT64 and node_of(x, "TopK") is not None:
        if x.dtype != ir.DataType.INT64 or y.is_graph_output():
            return False
        ir.convenience.replace_all_uses_with(y, x)
        return True
    expand = node_of(cast.inputs[0], "Expand")
    constant = None if expand is None else expand.inputs[0]
    tensor = None if constant is None else constant.const_value
    if expand is None or tensor is None or tensor.size != 1 or target != ir.DataType.BOOL:
        return False
    b = Builder(f"{name_of(cast)}/constant")
    value = b.constant(tensor.numpy() != 0)
    replace_output(graph, b, cast, y, b.op("Expand", value, expand.inputs[1], name="spread"))
    return True
