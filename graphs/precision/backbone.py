"""Quantises the linear layers of a traced backbone: `--quantize all`.

Only products with a constant matrix are touched. Attention's products of two activations, softmax,
normalisations and the router stay as they are, and so does what the graph's outputs come from
directly: a classifier's head is small, and its rounding would go into the result as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..names import INPUT, MICROSOFT, range_key
from .products import Linear, operand, product
from .types import (
    ComputeTypes,
    QuantFormat,
    QuantizedProducts,
    Range,
    WeightQuantization,
)
from .weights import activation_scale, quantize


@dataclass(frozen=True, slots=True)
class BackboneLinear:
    """A product with a constant matrix: y = x·W, of a `MatMul` or `Gemm` node.

    `weight` is [in, out], or [out, in] where `transposed` (a Gemm's transB).
    """

    node: ir.Node
    input: ir.Value
    weight: ir.Value
    transposed: bool

    @property
    def key(self) -> str:
        """The name of the input in a table of ranges."""
        assert self.node.name is not None
        return range_key(self.node.name, INPUT)


def backbone_linears(graph: ir.Graph) -> Iterator[BackboneLinear]:
    """Yields the linear layers of a traced graph in execution order, those of MoE layers not."""
    for node in graph:
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            continue
        x, weight = node.inputs[0], node.inputs[1]
        if x is None or weight is None or x.const_value is not None:
            continue
        tensor = weight.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
            continue
        if node.attributes.get_int("transA", 0):
            continue
        yield BackboneLinear(node, x, weight, bool(node.attributes.get_int("transB", 0)))


HEAD = "it gives the graph's output"


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A linear layer of the backbone; `reason`: why it stayed in floats, None where it is INT8."""

    node: str
    reason: str | None


def quantize_backbone(
    model: ir.Model,
    linears: list[BackboneLinear],
    range_of: Callable[[str], Range],
    form: QuantFormat,
    weights: WeightQuantization,
    float_type: ir.DataType,
) -> list[QuantizedLinear]:
    """Replaces the linear layers of a traced model by INT8 ones, in place; tells of each.

    `float_type` is what the model will compute in: scales are numbers that it holds.
    """
    made = []
    for linear in linears:
        name = linear.node.name
        assert name is not None
        head = _is_head(model.graph, linear.node)
        if not head:
            scale = activation_scale(range_of(linear.key), float_type, qdq=form == "qdq")
            quantized = QuantizedProducts(form, weights, {linear.key: scale})
            _replace(model.graph, linear, quantized, float_type)
        made.append(QuantizedLinear(name, HEAD if head else None))
    if form == "kernel" and any(each.reason is None for each in made):
        model.graph.opset_imports.setdefault(MICROSOFT, 1)
    return made


def _is_head(graph: ir.Graph, node: ir.Node) -> bool:
    """Whether nothing but additions and changes of shape lies between a node and an output."""
    moves = {"Add", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast"}
    for value in node.outputs:
        if value in graph.outputs:
            return True
        users = [user for user, _ in value.uses()]
        if users and all(user.op_type in moves and _is_head(graph, user) for user in users):
            return True
    return False


def _replace(
    graph: ir.Graph, linear: BackboneLinear, quantized: QuantizedProducts, float_type: ir.DataType
) -> None:
    node, tensor = linear.node, linear.weight.const_value
    assert tensor is not None and node.name is not None
    matrix = tensor.numpy().T if linear.transposed else tensor.numpy()
    integers, scale = quantize(matrix, quantized.weights, float_type)
    if quantized.format != "qdq":
        scale = scale * np.float32(quantized.inputs[linear.key].scale)
    b = Builder(node.name)
    compute = ComputeTypes(quantized=quantized)
    rows = operand(b, compute, linear.key, linear.input, "products")
    weight, scales = (
        b.weight(ir.tensor(array), f"{node.name}/{name}")
        for name, array in (("weight", integers), ("scale", scale))
    )
    constants = Linear(linear.key, weight, scales, None, "tokens")
    y = product(b, compute, rows, constants, "products")
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    if bias is not None:
        y = b.op("Add", y, bias, name="output")
    b.insert_before(graph, node)
    for each in b.nodes:  # what narrows the backbone to 16 bits goes by the types
        zero = each.inputs[2] if each.op_type == "QuantizeLinear" else None
        integer = ir.DataType.INT32 if each.op_type == "MatMulInteger" else ir.DataType.FLOAT
        dtype = integer if zero is None else zero.dtype
        assert dtype is not None
        each.outputs[0].type = ir.TensorType(dtype)
    old = node.outputs[0]
    y.shape = old.shape
    ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
    graph.remove(node, safe=True)
