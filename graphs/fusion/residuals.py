"""Fuses a residual with the following norm, and a bias with the following GELU.

The fused ops are ONNX Runtime's. On a GPU, each small op would read and write all tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..names import MICROSOFT
from .kernels import SKIP_RANKS, are_float32
from .patterns import both_orders, name_of, node_of, only_user, replace_output, replace_value

EPSILON = 1e-5
"""The default ε of `LayerNormalization`."""

GELUS = {"none": "BiasGelu", "tanh": "FastGelu"}
"""GELU with a bias, by approximation."""


def fuse_residual(graph: ir.Graph, norm: ir.Node) -> bool:
    """Fuses a residual, and an operand's bias, into a layer norm; returns whether it matched."""
    x, gain, *shift = norm.inputs
    add = node_of(x, "Add")
    parts = residual_operands(add)
    if parts is None or add is None or x is None or x.shape is None:
        return False
    last = norm.attributes.get_int("axis", -1) in (-1, len(x.shape) - 1)
    rows = is_row_of(gain, x) and all(value is None or is_row_of(value, x) for value in shift)
    if not (last and rows and are_float32(x, *parts, gain, *shift)):
        return False
    if any(value.uses() or value.is_graph_output() for value in norm.outputs[1:]):
        return False
    hidden, bias = [x], None
    skip, row = parts
    for summand, other in (parts, parts[::-1]):
        unbiased = _without_bias(summand, add)
        if unbiased is not None:
            hidden.append(summand)
            skip, (row, bias) = other, unbiased
            break
    sum_used = len(list(x.uses())) > 1 or x.is_graph_output()
    b = Builder(f"{name_of(norm)}/residual")
    inputs = (row, skip, gain, shift[0] if shift else None, bias)
    epsilon = norm.attributes.get_float("epsilon", EPSILON)
    y, total = skip_norm(graph, b, "SkipLayerNormalization", inputs, x, epsilon, summed=sum_used)
    replace_output(graph, b, norm, norm.outputs[0], y, hidden=hidden)
    if sum_used:
        replace_value(graph, x, total)
    return True


def skip_norm(
    graph: ir.Graph,
    b: Builder,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    x: ir.Value,
    epsilon: float,
    *,
    summed: bool = True,
) -> tuple[ir.Value, ir.Value]:
    """Adds the norm of a sum as one op; returns the result and, if `summed`, the sum."""
    names = ("normalised", "mean", "inverse", "sum") if summed else ("normalised",)
    outputs = b.ops(op_type, *inputs, names=names, domain=MICROSOFT, epsilon=epsilon)
    for value in outputs[1:-1]:  # the kernel does not return these
        value.name = ""
    graph.opset_imports.setdefault(MICROSOFT, 1)
    y, total = outputs[0], outputs[-1]
    total.shape, total.type = x.shape, x.type
    return y, total


def fuse_bias(graph: ir.Graph, gelu: ir.Node) -> bool:
    """Fuses the bias before a GELU into it; returns whether it matched."""
    op = GELUS.get(gelu.attributes.get_string("approximate", "none"))
    x = gelu.inputs[0]
    unbiased = None if x is None else _without_bias(x, gelu)
    if op is None or unbiased is None or not are_float32(*unbiased):
        return False
    b = Builder(f"{name_of(gelu)}/bias")
    y = b.op(op, *unbiased, name="activated", domain=MICROSOFT)
    graph.opset_imports.setdefault(MICROSOFT, 1)
    replace_output(graph, b, gelu, gelu.outputs[0], y, hidden=[x])
    return True


def detach_joint_bias(inputs: Sequence[ir.Value | None]) -> ir.Value | None:
    """Removes and returns the bias of a joint product for queries, keys and values."""
    split = node_of(inputs[0], "Split")
    if split is None or list(split.outputs) != list(inputs):
        return None
    add = node_of(split.inputs[0], "Add")
    for product, bias in both_orders(() if add is None else add.inputs):
        tensor = None if bias is None else bias.const_value
        if tensor is not None and len(tensor.shape) == 1 and node_of(product, "MatMul") is not None:
            split.replace_input_with(0, product)
            return bias
    return None


def without_biases(
    b: Builder, inputs: Sequence[ir.Value | None]
) -> tuple[list[ir.Value | None], ir.Value | None]:
    """Returns queries, keys and values without their products' biases, and the joined biases."""
    results: list[ir.Value | None] = []
    biases: list[np.ndarray] = []
    for value in inputs:
        assert value is not None and value.shape is not None
        user = next((node for node, _ in value.uses()), None)
        unbiased = None if user is None else _without_bias(value, user)
        tensor = None if unbiased is None else unbiased[1].const_value
        if unbiased is None or tensor is None:
            width = value.shape[-1]
            assert isinstance(width, int)  # the number of heads times their width
            results.append(value)
            biases.append(np.zeros(width, dtype=np.float32))
        else:
            results.append(unbiased[0])
            biases.append(tensor.numpy())
    if list(inputs) == results:
        return results, None
    return results, b.constant(np.concatenate(biases))


def residual_operands(add: ir.Node | None) -> tuple[ir.Value, ir.Value] | None:
    """Returns the two operands of an addition, if neither is broadcast."""
    if add is None:
        return None
    x, y = add.inputs
    total = add.outputs[0].shape
    if x is None or y is None or total is None or x.const_value or y.const_value:
        return None
    known = all(isinstance(size, int) or size.value is not None for size in total)
    same = known and len(total) in SKIP_RANKS and x.shape == total == y.shape
    return (x, y) if same else None


def is_row_of(weight: ir.Value | None, x: ir.Value) -> bool:
    """Returns whether a value has one number per column of another."""
    if weight is None or weight.shape is None or x.shape is None or len(weight.shape) != 1:
        return False
    return weight.shape[0] == x.shape[-1]


def _without_bias(total: ir.Value, user: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Returns an operand and the constant row added to it, if only `user` reads the sum."""
    add = node_of(total, "Add")
    if add is None or only_user(total, user.op_type) is not user:
        return None
    for x, bias in both_orders(add.inputs):
        if x is None or bias is None or bias.const_value is None or x.const_value is not None:
            continue
        if is_row_of(bias, total) and x.shape is not None and x.shape == total.shape:
            return x, bias
    return None
