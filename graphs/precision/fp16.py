"""Converts a traced backbone to 16-bit floats, with nodes that stay in FP32.

Every node either computes in 16 bits or stays as it is, for a reason that is kept; casts stand
where the two meet. MoE layers are nodes here, whose insides are the lowering's
(`types.py`): their outputs have 16 bits, and their inputs what they come as, since a router
reads them in FP32 and would see what a cast there and back has lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from ..names import DOMAIN
from .routers import router_nodes

FLOAT = ir.DataType.FLOAT

FP16_OPS = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Max", "Min", "Clip"),
        *("Relu", "Gelu", "Tanh", "Sigmoid", "Erf", "HardSigmoid", "HardSwish", "LeakyRelu"),
        *("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Concat", "Split", "Slice"),
        *("Gather", "GatherND", "GatherElements", "Expand", "Tile", "Where", "Pad", "Identity"),
        *("MaxPool", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Shape", "Cast"),
        *("QuantizeLinear", "DequantizeLinear"),
    }
)
"""Products, which runtimes sum in FP32 (but not ONNX Runtime on CPUs: `fp16_weights`),
what goes element by element without growing, and what only moves values."""

_STATISTICS = "its mean and variance are sums over many values"
_SUM = "a sum over many values"
FP32_OPS: Mapping[str, str] = MappingProxyType(
    {
        "Softmax": "exponentials, and their sum",
        "LogSoftmax": "exponentials, and their sum",
        "LayerNormalization": _STATISTICS,
        "RMSNormalization": _STATISTICS,
        "GroupNormalization": _STATISTICS,
        "InstanceNormalization": _STATISTICS,
        "BatchNormalization": _STATISTICS,
        "ReduceMean": _SUM,
        "ReduceSum": _SUM,
        "ReduceL1": _SUM,
        "ReduceL2": _SUM,
        "ReduceSumSquare": _SUM,
        "AveragePool": _SUM,
        "GlobalAveragePool": _SUM,
        "CumSum": _SUM,
        "Exp": "it overflows early",
        "Pow": "it overflows early",
    }
)
UNKNOWN = "not known to be safe in 16 bits"

HEADROOM = 2.0
"""An observed peak must fit so many times: other inputs may reach further."""

LOST = 5e-3
"""A weight tensor may lose this share of its norm to rounding: ten times what FP16 costs numbers in
its normal range, reached where many are too small for it."""


ORDINARY = 1e-4
"""Numbers whose root mean square is above this lose no more than 3e-8 of it each."""


@dataclass(frozen=True, slots=True)
class Fp32Node:
    """A node that stays in FP32, and why. `usual` where every network's node of its kind does."""

    node: str
    op_type: str
    reason: str
    usual: bool


def to_fp16(
    model: ir.Model,
    dtype: ir.DataType,
    *,
    peaks: Mapping[str, float] = MappingProxyType({}),
    io: ir.DataType = FLOAT,
    attention: bool = False,
) -> list[Fp32Node]:
    """Converts a traced model's backbone to `dtype`, in place, and returns what stayed in FP32.

    `peaks` are max|x| of values by name, where they were observed. Float inputs and outputs of the
    graph become `io`. With `attention` its softmax has 16 bits, as what goes in and comes out has
    anyway: for a runtime that makes one kernel of products and softmax of one type, and sums in
    FP32 in it.
    """
    routers = frozenset(router_nodes(model.graph))
    work = _Conversion(model.graph, dtype, peaks, routers, attention)
    for value in model.graph.inputs:
        if value.dtype == FLOAT:
            value.type = ir.TensorType(io)
            work.types[value] = io
    for node in list(model.graph):
        work.node(node)
    work.finish(io)
    return work.fp32_nodes


def misfit(array: np.ndarray, dtype: ir.DataType) -> str | None:
    """Returns why a float type cannot hold numbers, or None. Infinities are masks, and fit."""
    largest = limit(dtype)
    finite = np.abs(array[np.isfinite(array)]).astype(np.float32)
    peak = float(finite.max(initial=0.0))
    if peak > largest:
        return f"a weight of {peak:.3g} is more than {dtype.name} holds ({largest:.3g})"
    rms = float(np.linalg.norm(finite)) / max(1, finite.size) ** 0.5
    if dtype != ir.DataType.FLOAT16 or not peak or rms > ORDINARY:
        return None
    exact = finite.astype(np.float64)
    lost = np.linalg.norm(finite.astype(np.float16).astype(np.float64) - exact)
    share = float(lost / np.linalg.norm(exact))
    if share > LOST:
        return f"its weights are too small for {dtype.name}: {share:.1%} of them would be lost"
    return None


def limit(dtype: ir.DataType) -> float:
    """Returns the largest finite number of a float type."""
    return float(dtype.max)


def beyond(peak: float, dtype: ir.DataType) -> bool:
    """Whether an observed peak leaves too little room below the largest number a float type has."""
    return HEADROOM * peak > limit(dtype)


@dataclass
class _Conversion:
    """The state of one pass: the float type of every value so far, and the casts already made."""

    graph: ir.Graph
    dtype: ir.DataType
    peaks: Mapping[str, float]
    routers: frozenset[ir.Node]
    attention: bool
    types: dict[ir.Value, ir.DataType] = field(default_factory=dict)
    fp32_nodes: list[Fp32Node] = field(default_factory=list)
    _casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)
    _misfits: dict[ir.Value, str | None] = field(default_factory=dict)

    def node(self, node: ir.Node) -> None:
        """Decides for one node and gives it inputs of the type that it computes in."""
        floats = [v for v in node.inputs if v is not None and v.dtype in (FLOAT, self.dtype)]
        made = [v for v in node.outputs if v.dtype == FLOAT]
        if not floats and not made:
            return
        reason, usual = self._reason(node, floats, made)
        target = self.dtype if reason is None else FLOAT
        if reason is not None:
            assert node.name is not None
            self.fp32_nodes.append(Fp32Node(node.name, node.op_type, reason, usual))
        if node.op_type == "Cast" and made and reason is None:
            node.attributes["to"] = ir.AttrInt64("to", target.value)
        for index, value in enumerate(node.inputs):
            if value in floats and node.domain != DOMAIN:
                assert value is not None
                node.replace_input_with(index, self._as(value, target, node))
        for value in made:
            value.type = ir.TensorType(target)
            self.types[value] = target

    def finish(self, io: ir.DataType) -> None:
        """Gives the graph's float outputs their type, under their names."""
        for index, value in enumerate(list(self.graph.outputs)):
            type_ = self.types.get(value)
            if type_ is None or type_ == io:
                continue
            name, producer = value.name, value.producer()
            assert name is not None and producer is not None
            value.name = f"{name}/narrow" if type_ == self.dtype else f"{name}/wide"
            cast = _cast(value, io, name)
            self.graph.append(cast)
            cast.outputs[0].shape = value.shape
            self.graph.outputs[index] = cast.outputs[0]

    def _reason(
        self, node: ir.Node, floats: list[ir.Value], made: list[ir.Value]
    ) -> tuple[str | None, bool]:
        """Why a node stays in FP32, and whether its kind always does; None where it has 16 bits."""
        if node in self.routers:
            return "it chooses experts", True
        if self.attention and _of_attention(node):
            return None, False
        return self._reason_of_kind(node) or self._reason_of_values(node, floats, made)

    def _reason_of_kind(self, node: ir.Node) -> tuple[str | None, bool] | None:
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            return "it holds a graph of its own", False
        if node.domain not in ("", DOMAIN):
            return UNKNOWN, False
        if not node.domain and node.op_type not in FP16_OPS:
            usual = FP32_OPS.get(node.op_type)
            return usual or UNKNOWN, usual is not None
        return None

    def _reason_of_values(
        self, node: ir.Node, floats: list[ir.Value], made: list[ir.Value]
    ) -> tuple[str | None, bool]:
        for value in made if node.domain == DOMAIN else (*floats, *made):
            assert value.name is not None
            peak = self.peaks.get(value.name)
            if peak is not None and beyond(peak, self.dtype):
                return f"a value of {peak:.3g} was seen at {value.name}", False
        for value in floats:
            if value.is_initializer() and (problem := self._misfit(value)):
                return problem, False
        return None, False

    def _misfit(self, value: ir.Value) -> str | None:
        if value not in self._misfits:
            tensor = value.const_value
            assert tensor is not None
            self._misfits[value] = misfit(tensor.numpy(), self.dtype)
        return self._misfits[value]

    def _as(self, value: ir.Value, target: ir.DataType, user: ir.Node) -> ir.Value:
        """The value in the type that a node computes in: itself, a 16-bit constant, or a cast."""
        if self.types.get(value, FLOAT) == target:
            return value
        key = (value, target)
        if key not in self._casts:
            name = f"{value.name}/{'narrow' if target == self.dtype else 'wide'}"
            if value.is_initializer():
                self._casts[key] = self._fp16_constant(value, name)
            else:
                cast = _cast(value, target, name)
                self.graph.insert_before(user, cast)
                self._casts[key] = cast.outputs[0]
                self._casts[key].shape = value.shape
        return self._casts[key]

    def _fp16_constant(self, value: ir.Value, name: str) -> ir.Value:
        """The constant in 16 bits, converted when it is written; what nobody needs in FP32 goes."""
        tensor, dtype = value.const_value, self.dtype
        assert tensor is not None

        def convert() -> ir.TensorProtocol:
            return ir.Tensor(tensor.numpy().astype(dtype.numpy()), name=name)

        shape = ir.Shape(tensor.shape.numpy())
        lazy = ir.LazyTensor(convert, dtype=dtype, shape=shape, name=name)
        type_ = ir.TensorType(dtype)
        converted = ir.Value(name=name, shape=value.shape, type=type_, const_value=lazy)
        self.graph.register_initializer(converted)
        return converted


def _of_attention(node: ir.Node) -> bool:
    """Whether a node is a softmax between two products, whose results have 16 bits."""
    if node.domain or node.op_type != "Softmax" or node.inputs[0] is None:
        return False
    before = node.inputs[0].producer()
    users = [user for user, _ in node.outputs[0].uses()]
    return (
        before is not None
        and before.op_type == "MatMul"
        and bool(users)
        and all(user.op_type == "MatMul" for user in users)
    )


def _cast(value: ir.Value, target: ir.DataType, name: str) -> ir.Node:
    output = ir.Value(name=name, type=ir.TensorType(target))
    return ir.node(
        "Cast", [value], attributes={"to": target.value}, outputs=[output], name=f"{name}/Cast"
    )
