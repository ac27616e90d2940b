"""Converts a traced backbone to 16-bit floats, with nodes that stay in FP32.

Every node either computes in 16 bits or stays in FP32 for a recorded reason; casts connect the two.
MoE layers are single nodes here, and their lowerings determine the types inside (`types.py`). Their
outputs have 16 bits, but their inputs keep their type, because a router reads them in FP32, and
casting them twice would lose digits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from ..fusion.patterns import node_of, number_in
from ..names import COMPUTED_BY, DOMAIN, HIDDEN, MICROSOFT, is_cached
from .fp16_weights import MOVES, add_cast
from .routers import angle_nodes, router_nodes

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
"""Products, which runtimes sum in FP32 (except ONNX Runtime on CPUs: see `fp16_weights`),
elementwise ops whose values do not grow, and ops that only move values."""

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
WIDE_SUMS = frozenset(
    {
        *(("", op) for op in ("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization")),
        *(("", op) for op in ("Attention", "RotaryEmbedding")),
        *((MICROSOFT, op) for op in ("MultiHeadAttention", "BiasGelu", "FastGelu")),
        *((MICROSOFT, f"Skip{norm}LayerNormalization") for norm in ("", "Simplified")),
    }
)
"""Ops, some fused, by domain and name, whose 16-bit kernels sum in FP32 in some runtimes."""

WIDE_MOVES = frozenset(
    {"ScatterND", "ScatterElements", "ConstantOfShape", "ReduceMax", "ReduceMin", "TopK"}
)
"""Ops whose outputs are numbers from their inputs or attributes. They have 16 bits in runtimes that
compute `WIDE_SUMS` in 16 bits."""

COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})

NOT_IN_BF16 = COMPARISONS | frozenset(
    {"Clip", "Conv", "HardSigmoid", "HardSwish", "LeakyRelu", "LogSoftmax", "MaxPool", "Pad"}
)
"""Ops for which ONNX Runtime's CUDA provider has no BF16 kernel (for some, only from opset 22)."""

UNKNOWN = "not known to be safe in 16 bits"

UNOBSERVED = frozenset({*MOVES, "Pad", "Tile", "Cast"})
"""Ops that create no new values, so their outputs are not observed."""

FP16_KERNELS = frozenset({"MatMulNBits"})
"""ONNX Runtime's own ops that compute in 16 bits: products that sum in FP32."""

HEADROOM = 2.0
"""The factor by which a type's limit must exceed an observed peak: other inputs may be larger."""

MAX_LOSS = 5e-3
"""The share of a weight tensor's norm that rounding may lose: ten times FP16's loss in its normal
range. It is reached if many numbers are too small for FP16."""


SAFE_RMS = 1e-4
"""Weights with a root mean square above this lose little: FP16 rounds small numbers by ≤ 3e-8."""


@dataclass(frozen=True, slots=True)
class Fp32Node:
    """A node that stays in FP32, and why. `usual`: its kind stays in FP32 in every network."""

    node: str
    op_type: str
    reason: str
    usual: bool


def to_fp16(
    model: ir.Model,
    dtype: ir.DataType,
    *,
    peaks: Mapping[str, float],
    io: ir.DataType,
    attention: bool,
    wide_sums: bool,
    narrow_cache: bool,
) -> list[Fp32Node]:
    """Converts a traced model's backbone to `dtype`, in place, and returns the nodes left in FP32.

    `peaks` are the observed max|x| by the name of the node that computes x. Float inputs and
    outputs of the graph become `io`. With `attention`, the softmax of attention has 16 bits, for a
    runtime that fuses products and softmax of one type into a kernel, which sums in FP32. With
    `wide_sums`, `WIDE_SUMS` have 16 bits, for a runtime whose 16-bit kernels sum in FP32. With
    `narrow_cache`, cached keys and values are `dtype`, whatever `io` is.
    """
    in_fp32 = dict.fromkeys(angle_nodes(model.graph), "it computes an angle")
    in_fp32 |= dict.fromkeys(router_nodes(model.graph), "it chooses experts")
    if wide_sums and dtype == ir.DataType.BFLOAT16:
        no_kernel = [n for n in model.graph if not n.domain and n.op_type in NOT_IN_BF16]
        in_fp32 |= dict.fromkeys(no_kernel, "CUDA has no kernel for it in BF16")
    conversion = _Conversion(model.graph, dtype, peaks, in_fp32, attention, wide_sums)
    cache = {value for value in conversion.interface if narrow_cache and is_cached(str(value.name))}
    for value in model.graph.inputs:
        if value.dtype == FLOAT:
            conversion.types[value] = dtype if value in cache else io
            value.type = ir.TensorType(conversion.types[value])
    for node in list(model.graph):
        conversion.convert_node(node)
    conversion.finish(io, cache)
    return conversion.fp32_nodes


def misfit(array: np.ndarray, dtype: ir.DataType) -> str | None:
    """Returns why a float type cannot represent numbers, or None. Infinities are masks, and fit."""
    largest = limit(dtype)
    finite = np.abs(array[np.isfinite(array)]).astype(np.float32)
    peak = float(finite.max(initial=0.0))
    if peak > largest:
        return f"a weight of {peak:.3g} is above the largest {dtype.name} ({largest:.3g})"
    rms = float(np.linalg.norm(finite)) / max(1, finite.size) ** 0.5
    if dtype != ir.DataType.FLOAT16 or not peak or rms > SAFE_RMS:
        return None
    exact = finite.astype(np.float64)
    lost = np.linalg.norm(finite.astype(np.float16).astype(np.float64) - exact)
    share = float(lost / np.linalg.norm(exact))
    if share > MAX_LOSS:
        return f"its weights are too small for {dtype.name}: {share:.1%} of their norm is lost"
    return None


def limit(dtype: ir.DataType) -> float:
    """Returns the largest finite number of a float type."""
    return float(dtype.max)


def lacks_headroom(peak: float, dtype: ir.DataType) -> bool:
    """Returns whether a peak leaves too little headroom below the type's largest number."""
    return HEADROOM * peak > limit(dtype)


@dataclass
class _Conversion:
    """The state of one pass: the float type of every value so far, and existing casts."""

    graph: ir.Graph
    dtype: ir.DataType
    peaks: Mapping[str, float]
    in_fp32: Mapping[ir.Node, str]
    attention: bool
    wide_sums: bool
    types: dict[ir.Value, ir.DataType] = field(default_factory=dict)
    fp32_nodes: list[Fp32Node] = field(default_factory=list)
    _casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)
    _misfits: dict[ir.Value, str | None] = field(default_factory=dict)

    @property
    def interface(self) -> tuple[ir.Value, ...]:
        return (*self.graph.inputs, *self.graph.outputs)

    def convert_node(self, node: ir.Node) -> None:
        """Decides the type in which one node computes, and casts its inputs to it."""
        floats = [v for v in node.inputs if v is not None and v.dtype in (FLOAT, self.dtype)]
        results = [v for v in node.outputs if v.dtype == FLOAT]
        if (not floats and not results) or self._is_inner_shape(node):
            return
        reason, usual = self._reason(node, floats, results)
        target = self.dtype if reason is None else FLOAT
        if self._compares_fp32(node, floats):
            reason, target = None, FLOAT
        if reason is not None:
            assert node.name is not None
            self.fp32_nodes.append(Fp32Node(node.name, node.op_type, reason, usual))
        if node.op_type == "Cast" and results and reason is None:
            node.attributes["to"] = ir.AttrInt64("to", target.value)
        if node.op_type == "ConstantOfShape" and reason is None:
            filled = node.attributes.get_tensor("value", None)
            number = np.zeros(1, np.float32) if filled is None else filled.numpy()
            narrow = ir.Tensor(number.astype(target.numpy()), name="value")
            node.attributes["value"] = ir.AttrTensor("value", narrow)
        for index, value in enumerate(node.inputs):
            if value in floats and node.domain != DOMAIN:
                assert value is not None
                node.replace_input_with(index, self._cast_to(value, target, node))
        for value in results:
            value.type = ir.TensorType(target)
            self.types[value] = target

    def _is_inner_shape(self, node: ir.Node) -> bool:
        """Returns whether a node returns the shape of an inner value, which needs no cast."""
        inside = node.op_type == "Shape" and not node.domain and self.wide_sums
        return inside and not any(v is not None and v.is_graph_input() for v in node.inputs)

    def _compares_fp32(self, node: ir.Node, floats: list[ir.Value]) -> bool:
        """Returns whether a node compares values that are computed in FP32 anyway."""
        computed = [value for value in floats if not value.is_initializer()]
        return (
            self.wide_sums
            and not node.domain
            and node.op_type in COMPARISONS
            and bool(computed)
            and all(self.types.get(value) == FLOAT for value in computed)
        )

    def finish(self, io: ir.DataType, cache: Collection[ir.Value]) -> None:
        """Casts the graph's float outputs to their types; they keep their names."""
        for index, value in enumerate(list(self.graph.outputs)):
            type_ = self.types.get(value)
            target = self.dtype if value in cache else io
            if type_ is None or type_ == target:
                continue
            name, producer = value.name, value.producer()
            assert name is not None and producer is not None
            value.name = f"{name}/narrow" if type_ == self.dtype else f"{name}/wide"
            self.graph.outputs[index] = add_cast(self.graph, None, value, target, name)

    def _reason(
        self, node: ir.Node, floats: list[ir.Value], results: list[ir.Value]
    ) -> tuple[str | None, bool]:
        """Returns why a node stays in FP32 and whether its kind always does; None for 16 bits."""
        if node in self.in_fp32:
            return self.in_fp32[node], True
        if self.attention and _in_attention(node):
            return None, False
        return self._reason_of_kind(node) or self._reason_of_values(node, floats, results)

    def _reason_of_kind(self, node: ir.Node) -> tuple[str | None, bool] | None:
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            return "it contains a graph", False
        if self.wide_sums and (node.domain, node.op_type) in WIDE_SUMS:
            return None
        if node.domain not in ("", DOMAIN):
            return None if node.op_type in FP16_KERNELS else (UNKNOWN, False)
        if self.wide_sums and (_returns_inputs(node, self.dtype) or _squares(node)):
            return None
        if not node.domain and node.op_type not in FP16_OPS:
            usual = FP32_OPS.get(node.op_type)
            return usual or UNKNOWN, usual is not None
        return None

    def _reason_of_values(
        self, node: ir.Node, floats: list[ir.Value], results: list[ir.Value]
    ) -> tuple[str | None, bool]:
        values = results if node.domain == DOMAIN else (*floats, *results)
        observed = [name for value in values for name in _observed_names(value)]
        for name in (*observed, *node.meta.get(HIDDEN, ())):
            peak = self.peaks.get(name)
            if peak is not None and lacks_headroom(peak, self.dtype):
                return f"a value of {peak:.3g} was seen at {name}", False
        for value in floats:
            if value.is_initializer() and (problem := self._misfit(value)):
                return problem, False
        return None, False

    def _misfit(self, value: ir.Value) -> str | None:
        if value not in self._misfits:
            tensor = value.const_value
            assert tensor is not None
            array = self._limited(tensor.numpy())
            self._misfits[value] = misfit(array, self.dtype)
        return self._misfits[value]

    def _limited(self, array: np.ndarray) -> np.ndarray:
        """Returns a constant with FP32's extreme value replaced with that of the 16-bit type.

        Such a constant is a mask: values that are added to it or chosen instead are never larger.
        """
        extreme = self.wide_sums and array.size == 1 and np.abs(array) == np.finfo(np.float32).max
        return np.sign(array) * np.float32(limit(self.dtype)) if extreme else array

    def _cast_to(self, value: ir.Value, target: ir.DataType, user: ir.Node) -> ir.Value:
        """Returns a value in a node's type: the same value, a 16-bit constant, or a cast."""
        if self.types.get(value, FLOAT) == target:
            return value
        key = (value, target)
        if key not in self._casts:
            name = f"{value.name}/{'narrow' if target == self.dtype else 'wide'}"
            if value.is_initializer():
                self._casts[key] = self._fp16_constant(value, name)
            else:
                self._casts[key] = add_cast(self.graph, user, _uncast(value), target, name)
                self._casts[key].shape = value.shape
        return self._casts[key]

    def _fp16_constant(self, value: ir.Value, name: str) -> ir.Value:
        """Returns the constant in 16 bits, converted when it is written."""
        tensor, dtype = value.const_value, self.dtype
        assert tensor is not None

        def convert() -> ir.TensorProtocol:
            return ir.Tensor(self._limited(tensor.numpy()).astype(dtype.numpy()), name=name)

        shape = ir.Shape(tensor.shape.numpy())
        lazy = ir.LazyTensor(convert, dtype=dtype, shape=shape, name=name)
        type_ = ir.TensorType(dtype)
        converted = ir.Value(name=name, shape=value.shape, type=type_, const_value=lazy)
        self.graph.register_initializer(converted)
        return converted


def _returns_inputs(node: ir.Node, dtype: ir.DataType) -> bool:
    """Returns whether a node only returns numbers from its inputs, and has a kernel for `dtype`."""
    if node.domain or node.op_type not in WIDE_MOVES:
        return False
    # CUDA has these kernels for FP16, but not for BF16.
    if node.op_type == "TopK" or node.op_type.startswith("Reduce"):
        return dtype == ir.DataType.FLOAT16
    return node.attributes.get_string("reduction", "none") == "none"


def _squares(node: ir.Node) -> bool:
    """Returns whether a node squares numbers for 16-bit users, not for a sum as in a variance."""
    if node.domain or node.op_type != "Pow" or number_in(node.inputs[1]) != 2:
        return False
    users = [user for user, _ in node.outputs[0].uses()]
    return bool(users) and all(user.op_type in FP16_OPS for user in users)


def _observed_names(value: ir.Value) -> Iterator[str]:
    """Yields the names under which a value was observed, before other nodes moved it."""
    node = value.producer()
    if COMPUTED_BY in value.meta:
        yield str(value.meta[COMPUTED_BY])
    elif node is not None and not node.domain and node.op_type in UNOBSERVED:
        moved = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        for source in moved:
            if source is not None:
                yield from _observed_names(source)
    elif node is not None:
        yield str(node.name)


def _uncast(value: ir.Value) -> ir.Value:
    """Returns the source of a cast from a non-float, so that numbers are only rounded once."""
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    if source is None or source.dtype is None or source.dtype.is_floating_point():
        return value
    return source


def _in_attention(node: ir.Node) -> bool:
    """Returns whether a node is a softmax between two products, whose results have 16 bits."""
    if node.domain or node.op_type != "Softmax" or node_of(node.inputs[0], "MatMul") is None:
        return False
    users = [user for user, _ in node.outputs[0].uses()]
    return bool(users) and all(user.op_type == "MatMul" for user in users)
