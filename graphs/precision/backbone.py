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

from .types import QuantFormat, Range, WeightQuantization, range_key
from .weights import activation_scale, quantise

INPUT = "input"


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
class QuantisedLinear:
    """A linear layer of the backbone; `reason`: why it stayed in floats, None where it is INT8."""

    node: str
    reason: str | None


def quantize_backbone(
    model: ir.Model,
    linears: list[BackboneLinear],
    range_of: Callable[[str], Range],
    form: QuantFormat,
    grid: WeightQuantization,
    float_type: ir.DataType,
) -> list[QuantisedLinear]:
    """Replaces the linear layers of a traced model by INT8 ones, in place; tells of each.

    `float_type` is what the model will compute in: scales are numbers that it holds.
    """
    made = []
    for linear in linears:
        name = linear.node.name
        assert name is not None
        if _is_head(model.graph, linear.node):
            made.append(QuantisedLinear(name, HEAD))
            continue
        _replace(model.graph, linear, range_of(linear.key), form, grid, float_type)
        made.append(QuantisedLinear(name, None))
    if form == "kernel" and any(each.reason is None for each in made):
        model.graph.opset_imports.setdefault("com.microsoft", 1)
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
    graph: ir.Graph,
    linear: BackboneLinear,
    seen: Range,
    form: QuantFormat,
    grid: WeightQuantization,
    float_type: ir.DataType,
) -> None:
    node, tensor = linear.node, linear.weight.const_value
    assert tensor is not None and node.name is not None
    matrix = tensor.numpy().T if linear.transposed else tensor.numpy()
    integers, scale = quantise(matrix, grid, float_type)
    write = _Writer(graph, node)
    qdq = form == "qdq"
    activation = activation_scale(seen, float_type, qdq=qdq)
    step = write.constant("step", np.array(activation.scale, np.float32))
    kind = np.int8 if qdq else np.uint8
    zero = write.constant("zero", np.array(activation.zero_point, kind))
    rows = write.op("QuantizeLinear", [linear.input, step, zero], "integers")
    weight = write.constant("weight", integers)
    weight_zero = (
        write.constant("weight_zero", np.array(grid.zero_point, np.uint8))
        if grid.zero_point
        else None
    )
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    if qdq:
        rows = write.op("DequantizeLinear", [rows, step, zero], "rounded")
        scales = write.constant("scale", scale)
        weight = write.op("DequantizeLinear", [weight, scales], "dequantised", axis=1)
        product = write.op("MatMul", [rows, weight], "products")
    else:
        scales = write.constant("scale", (scale * np.float32(activation.scale)))
        if form == "kernel":
            one = write.constant("one", np.array(1.0, np.float32))
            operands = [rows, weight, one, scales, zero, weight_zero]
            product = write.op("MatMulIntegerToFloat", operands, "products", domain="com.microsoft")
        else:
            sums = write.op("MatMulInteger", [rows, weight, zero, weight_zero], "sums")
            floats = write.op("Cast", [sums], "floats", to=ir.DataType.FLOAT.value)
            product = write.op("Mul", [floats, scales], "products")
    if bias is not None:
        product = write.op("Add", [product, bias], "output")
    write.finish(product)


class _Writer:
    """Puts nodes in the place of one, named below it."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self._graph, self._node = graph, node

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """Returns an initializer."""
        full = f"{self._node.name}/{name}"
        tensor = ir.tensor(array, name=full)
        value = ir.Value(
            name=full,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return value

    def op(
        self,
        op_type: str,
        inputs: list[ir.Value | None],
        name: str,
        *,
        domain: str = "",
        **attributes: int,
    ) -> ir.Value:
        """Adds a node with one output before the one that is replaced."""
        full = f"{self._node.name}/{name}"
        kind = {"QuantizeLinear": None, "MatMulInteger": ir.DataType.INT32}.get(
            op_type, ir.DataType.FLOAT
        )
        if kind is None:
            zero = inputs[2]
            assert zero is not None and zero.dtype is not None
            kind = zero.dtype
        output = ir.Value(name=full, type=ir.TensorType(kind))
        node = ir.node(
            op_type, inputs, attributes=attributes, domain=domain, outputs=[output], name=full
        )
        self._graph.insert_before(self._node, node)
        return output

    def finish(self, product: ir.Value) -> None:
        """Lets the result take the place of the node's output, and removes the node."""
        old = self._node.outputs[0]
        product.shape = old.shape
        ir.convenience.replace_all_uses_with(old, product, replace_graph_outputs=True)
        self._graph.remove(self._node, safe=True)
