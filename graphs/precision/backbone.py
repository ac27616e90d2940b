"""Quantises the linear layers of a traced backbone: `--quantize all`.

Only products with a constant matrix are changed. Attention's products of two activations, softmax,
normalisations and routers stay unchanged. With calibrated INT8, so do the layers directly before
the graph's outputs: a classifier's head is small, and its rounding error would reach the result in
full. If rows have their own scales, or stay floats, the head is included: the head of a language
model reads as many bytes as its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..fusion.patterns import node_of, only_user
from ..layers.base import StoredPart
from ..names import INPUT, MICROSOFT, range_key
from ..targets import QuantFormat
from .products import Linear, operand, product, scale_rows
from .routers import router_nodes
from .types import (
    DYNAMIC_ROW,
    INT4_BLOCK,
    Bits,
    BlockedWeights,
    ComputeTypes,
    QuantizedProducts,
    Range,
    WeightQuantization,
    block_of,
)
from .weights import activation_scale, convert_weights, quantize


@dataclass(frozen=True, slots=True)
class BackboneLinear:
    """A product with a constant matrix: y = x·W, from a `MatMul` or `Gemm` node.

    `weight` is [in, out], or [out, in] if `transposed` (a Gemm's transB).
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

    @property
    def width(self) -> int:
        return int(self._tensor.shape.numpy()[1 if self.transposed else 0])

    @property
    def bias(self) -> ir.Value | None:
        adds = self.node.op_type == "Gemm" and len(self.node.inputs) > 2
        return self.node.inputs[2] if adds else None

    @property
    def matrix(self) -> np.ndarray:
        """The weight as [in, out]."""
        return self._tensor.numpy().T if self.transposed else self._tensor.numpy()

    @property
    def _tensor(self) -> ir.TensorProtocol:
        assert self.weight.const_value is not None
        return self.weight.const_value


def backbone_linears(graph: ir.Graph) -> Iterator[BackboneLinear]:
    """Yields the linear layers of a traced graph in execution order.

    Layers inside MoE layers and routers are excluded.
    """
    routers = router_nodes(graph)
    for node in graph:
        if node.domain or node.op_type not in ("MatMul", "Gemm") or node in routers:
            continue
        x, matrix = node.inputs[0], node.inputs[1]
        if x is None or matrix is None or x.const_value is not None:
            continue
        weight, in_graph = _stored(matrix)
        tensor = weight.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
            continue
        if node.attributes.get_int("transA", 0):
            continue
        transposed = bool(node.attributes.get_int("transB", 0)) != in_graph
        yield BackboneLinear(node, x, weight, transposed)


def _stored(weight: ir.Value) -> tuple[ir.Value, bool]:
    """Returns a weight as stored, and whether the graph transposes it.

    PyTorch's exporter transposes small weights itself and leaves large ones, such as a language
    model's head, to the graph; a head that is also the embedding is stored in the embedding's
    layout.
    """
    node = node_of(weight, "Transpose")
    stored = None if node is None else node.inputs[0]
    if node is None or stored is None or [*node.attributes.get_ints("perm", [1, 0])] != [1, 0]:
        return weight, False
    return stored, True


HEAD = "it computes the graph's output"


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A linear layer of the backbone; `reason` explains why it stayed in floats, or is None."""

    node: str
    reason: str | None


def quantize_backbone(
    model: ir.Model,
    linears: list[BackboneLinear],
    range_of: Callable[[str], Range] | None,
    form: QuantFormat,
    weights: WeightQuantization,
    float_type: ir.DataType,
    *,
    by_token: bool,
) -> list[QuantizedLinear]:
    """Replaces a traced model's linear layers with INT8 ones, in place; returns their records.

    `float_type` is the type that the model will compute in, which must represent the scales.
    Without ranges each row gets its own scale at run time. `by_token`: the model mostly computes
    one token at a time; the kernel for blocked weights is then 1.5 times as fast.
    """
    if by_token and range_of is None:
        return block_backbone(model, linears, form, bits=8)
    if range_of is None:
        for group in _by_input(linears):
            steps = {group[0].key: DYNAMIC_ROW}
            quantized = QuantizedProducts(form, weights, steps, dynamic=True)
            _replace(model.graph, group, ComputeTypes(quantized=quantized), float_type)
        return _records(model.graph, form, [(linear, None) for linear in linears])
    heads = set()
    for linear in linears:
        if _is_head(model.graph, linear.node):
            heads.add(linear)
            continue
        scale = activation_scale(range_of(linear.key), float_type, qdq=form == "qdq")
        quantized = QuantizedProducts(form, weights, {linear.key: scale})
        _replace(model.graph, [linear], ComputeTypes(quantized=quantized), float_type)
    return _records(model.graph, form, [(x, HEAD if x in heads else None) for x in linears])


def block_backbone(
    model: ir.Model,
    linears: list[BackboneLinear],
    form: QuantFormat,
    bits: Bits,
    *,
    on_gpu: bool = False,
) -> list[QuantizedLinear]:
    """Replaces the weights of a traced model's linear layers with blocked ones, in place."""
    for group in _by_input(linears):
        block = block_of(form, [group[0].width], bits, on_gpu=on_gpu)
        if block is not None:
            blocked = BlockedWeights(form, frozenset({group[0].key}), block, bits, on_gpu)
            compute = ComputeTypes(blocked=blocked)
            _replace(model.graph, group, compute, ir.DataType.FLOAT)
    reasons: list[tuple[BackboneLinear, str | None]] = []
    for linear in linears:
        reason = f"its rows have {linear.width} numbers, not a multiple of {INT4_BLOCK}"
        reasons.append((linear, reason if linear.width % INT4_BLOCK else None))
    return _records(model.graph, form, reasons)


def _records(
    graph: ir.Graph, form: QuantFormat, reasons: Iterable[tuple[BackboneLinear, str | None]]
) -> list[QuantizedLinear]:
    """Returns the records of linear layers; declares the domain of a kernel that they use."""
    records = [QuantizedLinear(str(linear.node.name), reason) for linear, reason in reasons]
    if form == "kernel" and any(record.reason is None for record in records):
        graph.opset_imports.setdefault(MICROSOFT, 1)
    return records


def _is_head(graph: ir.Graph, node: ir.Node) -> bool:
    """Returns whether only additions and layout changes follow a node up to an output."""
    moves = {"Add", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast"}
    for value in node.outputs:
        if value in graph.outputs:
            return True
        users = [user for user, _ in value.uses()]
        if users and all(user.op_type in moves and _is_head(graph, user) for user in users):
            return True
    return False


def _by_input(linears: Iterable[BackboneLinear]) -> list[list[BackboneLinear]]:
    """Groups linear layers that multiply the same rows, as queries, keys and values do.

    One product takes less time than several, and the rows are rounded once.
    """
    groups: dict[tuple[ir.Value, int | None], list[BackboneLinear]] = {}
    for index, linear in enumerate(linears):
        separate = None if linear.node.op_type == "MatMul" else index
        groups.setdefault((linear.input, separate), []).append(linear)
    return list(groups.values())


def _replace(
    graph: ir.Graph, group: Sequence[BackboneLinear], compute: ComputeTypes, float_type: ir.DataType
) -> None:
    """Puts one product in place of linear layers that have the same input."""
    first = group[0]
    node, key = first.node, first.key
    assert node.name is not None
    matrix, last_nodes = first.matrix, [linear.node for linear in group]
    if len(group) > 1:
        matrix = np.concatenate([linear.matrix for linear in group], axis=1)
    elif first.bias is None and (scaled := _scaled_after(node)) is not None:
        last_nodes, matrix = [scaled[0]], matrix * scaled[1]
    b = Builder(node.name)
    rows, by_row = first.input, None
    if compute.quantized is not None and compute.quantized.dynamic:
        rows, by_row = scale_rows(b, rows, "products")
    rows = operand(b, compute, key, rows, "products")
    weight, scales = (
        b.weight(tensor, f"{node.name}/{name}")
        for name, tensor in zip(
            ("weight", "scale"), _integers(key, matrix, compute, float_type), strict=True
        )
    )
    y = product(
        b,
        compute,
        rows,
        Linear(key=key, weight=weight, scale=scales, bias=None, rows="tokens"),
        "products",
    )
    if by_row is not None:
        y = b.op("Mul", y, by_row, name="unscaled")
    if first.bias is not None:
        y = b.op("Add", y, first.bias, name="output")
    outputs = [y]
    if len(group) > 1:
        widths = b.ints(*(linear.matrix.shape[1] for linear in group))
        names = [f"part/{index}" for index in range(len(group))]
        outputs = b.ops("Split", y, widths, names=names, axis=-1)
    b.insert_before(graph, node)
    for inner in b.nodes:  # converting the backbone to 16 bits needs the types
        zero = inner.inputs[2] if inner.op_type == "QuantizeLinear" else None
        integer = ir.DataType.INT32 if inner.op_type == "MatMulInteger" else ir.DataType.FLOAT
        dtype = integer if zero is None else zero.dtype
        assert dtype is not None
        for value in inner.outputs:
            value.type = ir.TensorType(dtype)
    for replaced, output in zip(last_nodes, outputs, strict=True):
        old = replaced.outputs[0]
        output.shape = old.shape
        if old in graph.outputs:
            output.name = old.name  # the graph's outputs keep their names
        ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    graph.remove({*last_nodes, *(linear.node for linear in group)}, safe=True)


def _scaled_after(node: ir.Node) -> tuple[ir.Node, np.float32] | None:
    """Returns the node that multiplies or divides a product by a constant, and the factor.

    The weights' scales absorb the factor.
    """
    output = node.outputs[0]
    user = only_user(output, "Mul") or only_user(output, "Div")
    factor = None if user is None or user.inputs[0] is not output else user.inputs[1]
    tensor = None if factor is None else factor.const_value
    if user is None or tensor is None or tensor.size != 1 or len(tensor.shape) > 1:
        return None
    number = np.float32(tensor.numpy().reshape(()))
    if tensor.dtype != ir.DataType.FLOAT or number == 0:
        return None
    return user, number if user.op_type == "Mul" else np.float32(1) / number


def _integers(
    key: str, matrix: np.ndarray, compute: ComputeTypes, float_type: ir.DataType
) -> Iterator[ir.TensorProtocol]:
    """Yields a weight [in, out] as integers, and its scales."""
    quantized = compute.quantized
    if quantized is not None:
        integers, scale = quantize(matrix, quantized.weights, float_type)
        if not quantized.in_qdq:
            scale = scale * np.float32(quantized.inputs[key].scale)
        yield from (ir.tensor(integers), ir.tensor(scale))
        return
    for part in convert_weights([StoredPart(key, matrix.shape, [matrix])], compute):
        (array,) = part.parts
        if part.dtype == ir.DataType.INT4:
            yield ir.PackedTensor(array, part.dtype, shape=ir.Shape(part.shape))
        else:
            yield ir.tensor(np.ascontiguousarray(array).reshape(part.shape))
